#include "tests/observe/scrape.h"

#include <algorithm>
#include <cstdlib>
#include <regex>
#include <sstream>

#include "tests/support/process.h"

namespace tributary::test {
namespace {

// A histogram's samples carry suffixes.
std::string FamilyOf(const std::string& sample, const Page& page) {
  for (const std::string suffix : {"_bucket", "_sum", "_count"}) {
    if (sample.size() <= suffix.size() || !sample.ends_with(suffix)) continue;
    const std::string name = sample.substr(0, sample.size() - suffix.size());
    const auto found = page.families.find(name);
    if (found != page.families.end() &&
        (found->second.type == "histogram" || found->second.type == "summary")) {
      return name;
    }
  }
  return sample;
}

std::string Stripped(const std::string& text) {
  const size_t begin = text.find_first_not_of(" `");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" `") - begin + 1);
}

}  // namespace

Page ParsePage(const std::string& text) {
  Page page;
  std::istringstream lines(text);
  const std::regex label("([a-zA-Z_]+)=\"");
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    if (line.rfind("# TYPE ", 0) == 0) {
      std::string hash, type_word, name;
      words >> hash >> type_word >> name;
      words >> page.families[name].type;
      continue;
    }
    if (line.empty() || line[0] == '#') continue;
    const size_t value = line.rfind(' ');
    const std::string sample = line.substr(0, value);
    page.samples[sample] = std::strtod(line.c_str() + value, nullptr);
    const size_t brace = sample.find('{');
    const std::string name = FamilyOf(sample.substr(0, brace), page);
    std::set<std::string>& labels = page.families[name].labels;
    if (brace == std::string::npos) continue;
    for (std::sregex_iterator
             it(sample.begin() + static_cast<ptrdiff_t>(brace), sample.end(), label),
         end;
         it != end; ++it) {
      const std::string found = (*it)[1];
      if (found != "le" && found != "quantile") labels.insert(found);
    }
  }
  return page;
}

std::map<std::string, MetricFamily> DocumentedMetrics(const std::vector<std::string>& headings) {
  std::map<std::string, MetricFamily> families;
  std::istringstream lines(ReadWholeFile(TRIBUTARY_SOURCE_DIR "/docs/metrics.md"));
  bool wanted = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("## ", 0) == 0) {
      wanted = std::find(headings.begin(), headings.end(), line.substr(3)) != headings.end();
    }
    if (!wanted || line.rfind("| `", 0) != 0) continue;
    std::istringstream cells(line);
    std::string cell, name, type, labels;
    std::getline(cells, cell, '|');
    std::getline(cells, name, '|');
    std::getline(cells, type, '|');
    std::getline(cells, labels, '|');
    MetricFamily& family = families[Stripped(name)];
    family.type = Stripped(type);
    std::istringstream names(labels);
    for (std::string one; std::getline(names, one, ',');) {
      if (!Stripped(one).empty()) family.labels.insert(Stripped(one));
    }
  }
  return families;
}

int MetricsPort(const std::string& log) {
  std::smatch match;
  if (std::regex_search(log, match, std::regex("metrics_port=([0-9]+)"))) {
    return std::atoi(match[1].str().c_str());
  }
  if (std::regex_search(log, match, std::regex("serving metrics port=([0-9]+)"))) {
    return std::atoi(match[1].str().c_str());
  }
  return 0;
}

}  // namespace tributary::test

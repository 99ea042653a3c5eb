#include "service/cli/report.h"

#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "service/cli/latencies.h"
#include "service/cli/limits_report.h"
#include "service/cli/progress.h"
#include "service/cli/session_report.h"
#include "service/cli/table.h"
#include "service/cli/top_report.h"
#include "service/cli/units.h"

namespace tributary::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const Style kPlain(false);
const Style kColoured(true);

TEST(Units, AreReadable) {
  EXPECT_EQ(Count(0), "0");
  EXPECT_EQ(Count(999), "999");
  EXPECT_EQ(Count(1000), "1,000");
  EXPECT_EQ(Count(-1234567), "-1,234,567");
  EXPECT_EQ(Bytes(0), "0 B");
  EXPECT_EQ(Bytes(1536), "1.50 KiB");
  EXPECT_EQ(Bytes(64.0 * 1024 * 1024), "64.0 MiB");
  EXPECT_EQ(Seconds(0.0000855), "85.5 us");
  EXPECT_EQ(Seconds(0.00125), "1.25 ms");
  EXPECT_EQ(Seconds(0.00099999), "1.00 ms");
  EXPECT_EQ(Seconds(0.999999), "1.00 s");
  EXPECT_EQ(Seconds(3), "3.00 s");
  EXPECT_EQ(Seconds(7500), "2 h 5 min");
  EXPECT_EQ(Rate(1234.4), "1,234");
  EXPECT_EQ(Rate(12.34), "12.3");
  EXPECT_EQ(Percent(1, 8), "12.5%");
  EXPECT_EQ(Percent(0, 0), "-");
}

TEST(Table, AlignsWhatIsSeen) {
  Table table({{"NAME"}, {"N", Align::kRight}});
  table.AddRow({kColoured.Red("a"), "1"});
  table.AddRow({"bär", kColoured.Green("1,000")});
  EXPECT_EQ(VisibleWidth(kColoured.Red("bär")), 3u);
  const std::vector<std::string> lines = absl::StrSplit(table.Render(kPlain), '\n');
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0], "NAME      N");
  EXPECT_EQ(lines[1], kColoured.Red("a") + "         1");
  EXPECT_EQ(lines[2], "bär   " + kColoured.Green("1,000"));
}

TEST(Progress, FitsTheLine) {
  EXPECT_EQ(ProgressLine("filling", 0.5, "7 tokens", 36), "filling   █████░░░░░  50%  7 tokens");
  for (const int width : {0, 20, 40, 80, 200}) {
    for (const double done : {-1.0, 0.0, 0.333, 1.0, 2.0}) {
      const size_t columns = VisibleWidth(ProgressLine("running", done, "x", width));
      if (width >= 40) {
        EXPECT_LT(columns, static_cast<size_t>(width));
      }
    }
  }
}

TEST(Latencies, PercentilesAreSamples) {
  Latencies latencies;
  EXPECT_EQ(latencies.Percentile(0.5), 0);
  for (int i = 1000; i > 0; --i) latencies.Add(i);
  EXPECT_EQ(latencies.Percentile(0.5), 500);
  EXPECT_EQ(latencies.Percentile(0.9), 900);
  EXPECT_EQ(latencies.Percentile(0.999), 999);
  EXPECT_EQ(latencies.Percentile(1.0), 1000);
  EXPECT_EQ(latencies.Mean(), 500.5);
  Latencies more;
  more.Add(0.25);
  latencies.Merge(more);
  EXPECT_EQ(latencies.Percentile(1e-9), 0.25);
  EXPECT_EQ(latencies.count(), 1001u);
}

v1::GetTopologyReply Topology() {
  v1::GetTopologyReply topology;
  topology.set_epoch(3);
  topology.set_state(v1::GROUP_STATE_FORMING);
  for (int rank = 0; rank < 2; ++rank) {
    auto& worker = *topology.add_workers();
    worker.set_rank(rank);
    worker.set_address("10.0.0.1:99");
    worker.set_backend("cpu");
    worker.set_connected(rank == 0);
    worker.set_memory_bytes(3 << 20);
  }
  auto& cache = *topology.add_caches();
  cache.set_cache_id("model");
  cache.mutable_spec()->set_kv_dtype(v1::DTYPE_FP8_E4M3);
  cache.set_pages_total(4000);
  cache.set_pages_used(1000);
  cache.set_pages_given_up(77);
  cache.set_sequences(2);
  auto& sequence = *cache.add_sequence();
  sequence.set_sequence_id(18446744073709551615u);
  sequence.set_length(1234);
  sequence.set_held_from(960);
  sequence.add_local_lengths(618);
  sequence.add_local_lengths(616);
  sequence.set_lost(true);
  return topology;
}

TEST(TopologyReport, SaysWhoHoldsWhat) {
  const std::string report = TopologyReport(Topology(), kPlain);
  for (const char* part :
       {"forming", "epoch 3", "1 of 2 workers", "lost", "3.00 MiB", "fp8_e4m3", "1,000", "25.0%",
        "18446744073709551615", "1,234", "960", "77", "RANK 1", "616", "... and 1 more"}) {
    EXPECT_THAT(report, HasSubstr(part));
  }
  EXPECT_THAT(report, Not(HasSubstr("\x1b"))) << "plain when it is not for a terminal";
  EXPECT_THAT(TopologyReport(Topology(), kColoured), HasSubstr("\x1b[31mlost"));
  EXPECT_THAT(TopologyReport({}, kPlain), HasSubstr("no caches"));
  v1::GetTopologyReply under_tls = Topology();
  under_tls.set_exchange("partials meet in host memory, by TCP under TLS 1.3");
  EXPECT_THAT(TopologyReport(under_tls, kPlain),
              HasSubstr("\npartials meet in host memory, by TCP"));
}

TEST(TopologyReport, SaysThatBuildsAreMixed) {
  v1::GetTopologyReply topology = Topology();
  topology.set_version("0.1.0-g1");
  for (v1::WorkerInfo& worker : *topology.mutable_workers()) {
    worker.set_connected(true);
    worker.set_version("0.1.0-g1");
    worker.set_protocol_version(8);
  }
  EXPECT_THAT(TopologyReport(topology, kPlain), Not(HasSubstr("mixed")));
  EXPECT_THAT(TopologyReport(topology, kPlain), Not(HasSubstr("PROTOCOL")));
  topology.mutable_workers(1)->set_version("0.0.9-g2");
  topology.mutable_workers(1)->set_protocol_version(7);
  for (const std::string& report :
       {TopologyReport(topology, kPlain), TopReport(topology, topology, 1, kPlain)}) {
    EXPECT_THAT(report, HasSubstr("version 0.1.0-g1  mixed builds"));
    EXPECT_THAT(report, HasSubstr("0.0.9-g2"));
    EXPECT_THAT(report, HasSubstr("PROTOCOL"));
  }
  topology.mutable_workers(1)->set_connected(false);  // nothing of it counts any more
  EXPECT_THAT(TopologyReport(topology, kPlain), Not(HasSubstr("mixed")));
}

TEST(LimitsReport, SaysWhatIsAcceptedAndHowPreciseF32Is) {
  v1::GetLimitsReply limits;
  limits.set_ranks(2);
  limits.set_device("cpu");
  limits.set_max_message_bytes(64 << 20);
  limits.add_output_dtypes(v1::DTYPE_NVFP4);
  limits.mutable_per_client()->set_caches(256);
  v1::BackendLimits* backend = limits.add_backends();
  backend->set_name("cpu");
  v1::ModeLimits* mode = backend->add_modes();
  mode->set_mode(v1::ATTEND_MODE_DFLASH);
  mode->set_anchor_window(true);
  mode->set_sinks(true);
  v1::HeadDimLimits* dims = backend->add_head_dims();
  dims->set_head_dim(192);
  dims->set_value_head_dim(128);
  v1::OutputError* error = backend->add_f32_output_errors();
  error->set_q_dtype(v1::DTYPE_BF16);
  error->set_kv_dtype(v1::DTYPE_FP8_E5M2);
  error->set_few_rows(0.002);
  error->set_many_rows(0.02);
  const std::string report = LimitsReport(limits, kPlain);
  for (const char* text :
       {"2 workers, cpu", "64.0 MiB", "nvfp4", "256", "no limit", "BACKEND CPU",
        "dflash (anchor_window, sinks)", "192/128", "fp8_e5m2", "2e-03", "2e-02"}) {
    EXPECT_THAT(report, HasSubstr(text));
  }
}

TEST(SessionsReport, SaysWhoWaitsHowAndHowFarTheyAre) {
  v1::GetTopologyReply topology;
  EXPECT_EQ(SessionsReport(topology, nullptr, 0, kPlain), "");
  v1::SessionInfo* device = topology.add_sessions();
  device->set_session_id(4);
  device->set_client("model-a");
  device->set_cache_id("m");
  device->set_memory(v1::SESSION_MEMORY_DEVICE);
  device->set_waiting(v1::WAITING_STREAM_MEMORY_OPS);
  device->set_round_trip_seconds(13.6e-6);
  device->set_warning("take turns");
  device->set_mailbox_bytes(3 << 20);
  device->set_steps_in_flight(2);
  device->set_steps_done(1000);
  device->set_layers_done(32'000);
  device->set_age_seconds(10);
  v1::SessionInfo* messages = topology.add_sessions();
  messages->set_session_id(5);
  messages->set_memory(v1::SESSION_MEMORY_MESSAGES);
  const std::string report = SessionsReport(topology, nullptr, 0, kPlain);
  for (const char* text : {"model-a", "device", "stream memory ops", "13.6 us", "3.00 MiB", "1,000",
                           "32,000", "session 4: take turns", "messages"}) {
    EXPECT_THAT(report, HasSubstr(text));
  }
  // Rates, also of a session that was not open before.
  v1::GetTopologyReply before = topology;
  before.mutable_sessions()->RemoveLast();
  before.mutable_sessions(0)->set_steps_done(900);
  before.mutable_sessions(0)->set_layers_done(28'800);
  const std::string rates = SessionsReport(topology, &before, 2, kPlain);
  EXPECT_THAT(rates, HasSubstr("STEPS/S"));
  EXPECT_THAT(rates, HasSubstr("50.0"));
  EXPECT_THAT(rates, HasSubstr("1,600"));
}

TEST(StatisticsReport, DividesByWhatThereWas) {
  v1::GetTopologyReply topology;
  EXPECT_THAT(StatisticsReport(topology, kPlain), Not(HasSubstr("nan")));
  v1::Statistics& statistics = *topology.mutable_statistics();
  statistics.set_steps(100);
  statistics.set_requests(400);
  statistics.set_attend_seconds(0.5);
  statistics.set_queue_seconds(0.4);
  topology.add_caches()->set_pages_given_up(40);
  topology.add_caches()->set_pages_given_up(2);
  const std::string report = StatisticsReport(topology, kPlain);
  EXPECT_THAT(report, HasSubstr("42"));
  EXPECT_THAT(report, HasSubstr("4.00 a step"));
  EXPECT_THAT(report, HasSubstr("5.00 ms"));
  EXPECT_THAT(report, HasSubstr("1.00 ms"));
}

TEST(Rates, AreOverTheInterval) {
  v1::Statistics before, after;
  before.set_steps(100);
  after.set_steps(300);
  before.set_attend_seconds(1);
  after.set_attend_seconds(1.2);
  const std::string line = RatesLine(before, after, 2.0);
  EXPECT_EQ(line.find("100"), line.find_first_not_of(' ')) << line;
  EXPECT_THAT(line, HasSubstr("1.00 ms"));
  // The service was restarted in between.
  EXPECT_THAT(RatesLine(after, before, 1.0), HasSubstr("100"));
  EXPECT_EQ(RatesTitle(kPlain).size(), line.size());
}

// A service of two ranks after `steps` steps.
v1::GetTopologyReply Running(uint64_t steps) {
  v1::GetTopologyReply topology = Topology();
  v1::Statistics& s = *topology.mutable_statistics();
  s.set_steps(steps);
  s.set_requests(2 * steps);
  s.set_attend_seconds(1e-3 * static_cast<double>(steps));
  s.set_skew_seconds(2e-4 * static_cast<double>(steps));
  for (const double bound : {1e-3, 2e-3, 4e-3}) s.add_call_seconds_bound(bound);
  for (const uint64_t count : {uint64_t{0}, 98 * steps / 100, 2 * steps / 100, uint64_t{0}}) {
    s.add_call_seconds_count(count);
  }
  s.add_slowest_steps(steps / 4);
  s.add_slowest_steps(3 * steps / 4);
  topology.mutable_workers(0)->set_busy_seconds(1e-3 * static_cast<double>(steps));
  return topology;
}

TEST(TopReport, ShowsTheInterval) {
  const std::string report = TopReport(Running(1000), Running(1400), 2.0, kPlain);
  for (const char* part : {
           "forming",
           "1 of 2 workers",
           "200",       // steps a second
           "400",       // calls per second
           "1.51 ms",   // p50: in the second bucket
           "3.00 ms",   // p99: half way through the third
           "200.0 us",  // skew
           "1.00 ms",   // attend
           "20.0%",     // rank 0 was busy for 0.4 of 2 s
           "75.0%",     // rank 1 was slowest
           "[#####               ]",
       }) {
    EXPECT_THAT(report, HasSubstr(part));
  }
  EXPECT_THAT(report, Not(HasSubstr("\x1b")));
}

TEST(TopReport, SaysWhereEachPageIsTwice) {
  v1::GetTopologyReply topology = Topology();
  v1::CacheInfo& cache = *topology.mutable_caches(0);
  const auto report = [&] { return TopReport(topology, topology, 1.0, kPlain); };
  EXPECT_THAT(report(), HasSubstr("none"));
  cache.mutable_spec()->set_replicas(1);
  EXPECT_THAT(report(), HasSubstr("whole"));
  cache.set_pages_without_replica(1234);
  EXPECT_THAT(report(), HasSubstr("copying, 1,234 pages left"));
  cache.set_pages_restoring(7);
  EXPECT_THAT(report(), HasSubstr("restoring, 7 pages left"));
}

TEST(TopReport, WithoutCallsThereIsNoLatency) {
  const std::string report = TopReport(Running(1000), Running(1000), 1.0, kPlain);
  EXPECT_THAT(report, Not(HasSubstr("nan")));
  EXPECT_THAT(report, HasSubstr("0.00"));
  // Restarted in between: what there is now has happened since.
  EXPECT_THAT(TopReport(Running(1000), Running(300), 1.0, kPlain), HasSubstr("300"));
  EXPECT_THAT(TopReport({}, {}, 0, kPlain), HasSubstr("no caches"));
}

TEST(FlightReport, ShowsStepsThatEndedAndThoseThatDidNot) {
  v1::FlightRecord record;
  v1::StepFlight& done = *record.add_steps();
  done.set_number(41);
  done.set_state(v1::StepFlight::DONE);
  done.set_kind(v1::StepFlight::PREFILL);
  done.set_new_tokens(4096);
  done.add_ranks()->set_attend_seconds(0.001);
  done.add_ranks()->set_attend_seconds(0.003);
  v1::StepFlight& stalled = *record.add_steps();
  stalled.set_number(42);
  stalled.set_state(v1::StepFlight::IN_FLIGHT);
  stalled.set_workers_seconds(17);
  const std::string report = FlightReport(record, kPlain);
  for (const char* part : {"41", "done", "prefill", "4,096", "3.00 ms", "in_flight", "17.00 s"}) {
    EXPECT_THAT(report, HasSubstr(part));
  }
  EXPECT_THAT(FlightReport({}, kPlain), HasSubstr("no steps"));
}

}  // namespace
}  // namespace tributary::cli

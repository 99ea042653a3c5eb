// Child processes of a test: started, signalled, waited for with a deadline, never left behind.
//
// What a child prints goes to a file, which is shown when the test has failed.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace tributary::test {

// A directory that is gone afterwards.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tributary-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  std::string File(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline std::string ReadWholeFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// How a process ended: its exit status, or minus the signal that killed it.
using ExitCode = int;

class ChildProcess {
 public:
  // `arguments[0]` is the program's path. The log is appended to.
  ChildProcess(std::vector<std::string> arguments, std::string log_path)
      : arguments_(std::move(arguments)), log_path_(std::move(log_path)) {
    std::vector<char*> argv;
    for (std::string& argument : arguments_) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const int log = open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log < 0) throw std::runtime_error("cannot write " + log_path_);
    sigset_t none;
    sigemptyset(&none);
    pid_ = fork();
    if (pid_ == 0) {
      // Only what is safe after a fork of a process with threads. A child never outlives its test.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      sigprocmask(SIG_SETMASK, &none, nullptr);
      dup2(log, STDOUT_FILENO);
      dup2(log, STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(log);
    if (pid_ < 0) throw std::runtime_error("fork failed");
  }

  ~ChildProcess() {
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      ::kill(pid_, SIGCONT);
      waitpid(pid_, nullptr, 0);
    }
    if (::testing::Test::HasFailure()) {
      std::fprintf(stderr, "--- log of %s (process %d)\n%s", arguments_[0].c_str(), pid_,
                   ReadWholeFile(log_path_).c_str());
    }
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  const std::string& program() const { return arguments_[0]; }
  std::string Log() const { return ReadWholeFile(log_path_); }
  void Signal(int signal_number) const {
    if (!ended_) ::kill(pid_, signal_number);
  }

  // Stops the process with SIGSTOP; returns when it has stopped, which is later than the signal.
  void Pause() const {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    while (waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
    }
    if (!WIFSTOPPED(status)) throw std::runtime_error("ended instead of pausing");
  }
  void Resume() const { ::kill(pid_, SIGCONT); }

  // How it ended; nothing when it still runs after `timeout`.
  std::optional<ExitCode> Wait(std::chrono::milliseconds timeout) {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (!ended_) {
      int status = 0;
      const pid_t reaped = waitpid(pid_, &status, WNOHANG);
      if (reaped == pid_) {
        ended_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
      } else if (reaped < 0 && errno != EINTR) {
        throw std::runtime_error("waitpid failed");
      } else if (std::chrono::steady_clock::now() >= deadline) {
        return std::nullopt;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    return ended_;
  }

 private:
  std::vector<std::string> arguments_;
  const std::string log_path_;
  pid_t pid_ = -1;
  std::optional<ExitCode> ended_;
};

// Asks until it is so or the timeout has passed; says which.
template <typename Predicate>
bool Eventually(std::chrono::milliseconds timeout, Predicate predicate) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!predicate()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return true;
}

}  // namespace tributary::test

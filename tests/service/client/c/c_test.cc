// The C interface: programs in C, as children, against a service in this process.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "service/embedded/embedded_service.h"
#include "tests/support/process.h"

namespace tributary {
namespace {

class CInterface : public testing::Test {
 protected:
  void SetUp() override {
    auto service = service::EmbeddedService::Start({.workers = 2, .threads = 2});
    ASSERT_TRUE(service.ok()) << service.status();
    service_ = *std::move(service);
  }
  // What the program printed; it must end well.
  std::string Run(const std::string& program) {
    const test::TemporaryDirectory folder;
    test::ChildProcess child({program, service_->target()}, folder.File("log"));
    EXPECT_EQ(child.Wait(std::chrono::seconds(120)), 0) << child.Log();
    return child.Log();
  }

 private:
  std::unique_ptr<service::EmbeddedService> service_;
};

TEST_F(CInterface, HoldsWhatItsHeaderSays) { EXPECT_EQ(Run(C_HOST), ""); }

TEST_F(CInterface, EndpointsOfASessionAreProcesses) { EXPECT_EQ(Run(C_ENDPOINTS), ""); }

TEST_F(CInterface, TheExampleShowsIt) {
  const std::string shown = Run(C_EXAMPLE);
  EXPECT_NE(shown.find("over 2 workers\n"), std::string::npos) << shown;
  EXPECT_NE(shown.find("row 3: 1.500\n"), std::string::npos) << shown;
  EXPECT_NE(shown.find("refused: entries[0].first_position, 4 tokens are held\n"),
            std::string::npos)
      << shown;
}

TEST_F(CInterface, TheExampleOfSessionsShowsThem) {
  const std::string shown = Run(C_SESSION_EXAMPLE);
  EXPECT_EQ(shown,
            "tensors lie in shared memory\n"
            "the prompt's last row: 1.500\n"
            "position 4: 2.000\n"
            "position 5: 2.500\n"
            "position 6: 3.000\n"
            "again: 3.000\n");
}

}  // namespace
}  // namespace tributary

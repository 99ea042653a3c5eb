// The layout of a mailbox as a message (session.proto), and back.
#pragma once

#include "base/mailbox/layout.h"
#include "tributary/v1/session.pb.h"

namespace tributary::mailbox {

v1::MailboxLayout MessageOf(const Layout& layout);
// As it is stated; whether it makes sense is for whoever uses it to check.
Layout ReadLayout(const v1::MailboxLayout& message);

}  // namespace tributary::mailbox

// The layout of a mailbox as a message (session.proto), and back.
#pragma once

#include "base/mailbox/layout.h"
#include "tributary/v1/session.pb.h"

namespace tributary::mailbox {

v1::MailboxLayout MessageOf(const Layout& layout);
// The layout as the message states it. The caller checks whether it makes sense.
Layout ReadLayout(const v1::MailboxLayout& message);

}  // namespace tributary::mailbox

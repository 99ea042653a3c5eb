// Empty: it belongs to the headers that tests over gRPC share (TRIBUTARY_QUICK_TESTS).

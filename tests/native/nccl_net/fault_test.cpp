// Peers that die, strangers at the door, programs that break the rules. Nothing may hang, leak, or disturb others.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "forged.h"

namespace bagua::nccl_net::rig {
namespace {

TEST(a_closed_sender_fails_all_that_wait) {
  Pair pair = connected();
  warnings();
  std::vector<uint8_t> buffer(1 << 20);
  void* requests[] = {receive(pair, buffer.data(), 1000), receive(pair, buffer.data() + 1000, 500000)};
  CHECK_EQ(net().close_send(pair.sender), kSuccess);
  pair.sender = nullptr;
  for (void* request : requests) EXPECT_EQ(finish(request), kRemoteError);
  EXPECT(warned_of("the peer closed the connection"));
  close(&pair);
}

TEST(what_was_sent_before_the_end_arrives) {
  Pair pair = connected();
  const std::vector<uint8_t> data = pattern(100000, 1);
  std::vector<uint8_t> buffer(data.size());
  void* out = send(pair, data.data(), data.size());
  if (int done = 0; net().test(out, &done, nullptr) == kSuccess && done == 0) CHECK_EQ(finish(out), kSuccess);
  CHECK_EQ(net().close_send(pair.sender), kSuccess);
  pair.sender = nullptr;
  EXPECT_EQ(finish(receive(pair, buffer.data(), buffer.size())), kSuccess);
  EXPECT(data == buffer);
  EXPECT_EQ(finish(receive(pair, buffer.data(), buffer.size())), kRemoteError);
  close(&pair);
}

TEST(a_closed_receiver_fails_all_that_is_unsent) {
  Pair pair = connected();
  warnings();
  const std::vector<uint8_t> data(64 << 20);
  void* requests[] = {send(pair, data.data(), data.size()), send(pair, data.data(), data.size())};
  CHECK_EQ(net().close_recv(pair.receiver), kSuccess);
  pair.receiver = nullptr;
  for (void* request : requests) EXPECT_EQ(finish(request), kRemoteError);
  EXPECT(warned_of("send to 127.0.0.1"));
  void* request = nullptr;
  EXPECT_EQ(net().isend(pair.sender, nullptr, 0, 0, nullptr, nullptr, &request), kRemoteError);
  close(&pair);
}

TEST(nothing_is_left_after_closing_with_requests_in_flight) {
  Pair first = connected();  // whatever is made once exists now
  close(&first);
  const size_t descriptors = open_descriptors();
  const size_t before = thread_count();
  std::vector<uint8_t> data(8 << 20);
  std::vector<uint8_t> buffer(8 << 20);
  for (int i = 0; i < 10; ++i) {
    Pair pair = connected();
    void* in = receive(pair, buffer.data(), buffer.size());
    send(pair, data.data(), data.size());
    send(pair, data.data(), 10);
    for (int k = 0; k < i; ++k) {
      int done = 0;
      CHECK_EQ(net().test(in, &done, nullptr), kSuccess);
    }
    close(&pair);
  }
  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(thread_count(), before);
}

// If NCCL aborts, it frees its buffers before it closes connections.
TEST(memory_that_is_given_back_is_left_alone) {
  Pair pair = connected();
  warnings();
  std::vector<uint8_t> data(32 << 20, 1);
  std::vector<uint8_t> buffer(data.size());
  void* handles[] = {nullptr, nullptr};
  CHECK_EQ(net().reg_mr(pair.receiver, buffer.data(), buffer.size(), kPtrHost, &handles[0]), kSuccess);
  CHECK_EQ(net().reg_mr(pair.sender, data.data(), data.size(), kPtrHost, &handles[1]), kSuccess);
  void* in = receive(pair, buffer.data(), buffer.size());
  void* out = send(pair, data.data(), data.size());
  int done = 0;
  while (std::all_of(buffer.begin(), buffer.begin() + 4096, [](uint8_t byte) { return byte == 0; })) {
    CHECK_EQ(net().test(out, &done, nullptr), kSuccess);
    CHECK_EQ(net().test(in, &done, nullptr), kSuccess);
  }
  CHECK_EQ(done, 0);
  CHECK_EQ(net().dereg_mr(pair.receiver, handles[0]), kSuccess);
  std::fill(buffer.begin(), buffer.end(), 0);  // somebody else's now
  for (int i = 0; i < 100; ++i) {
    if (net().test(out, &done, nullptr) != kSuccess || done != 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // in which helpers go on, if they do
  }
  EXPECT(std::all_of(buffer.begin(), buffer.end(), [](uint8_t byte) { return byte == 0; }));
  EXPECT_EQ(finish(in), kInternalError);
  CHECK_EQ(net().dereg_mr(pair.sender, handles[1]), kSuccess);
  EXPECT_EQ(finish(out), kInternalError);
  EXPECT(warnings().empty());  // nothing is wrong
  close(&pair);
}

TEST(connections_wait_for_descriptors) {
  Pair first = connected();  // helpers and their descriptors exist now
  warnings();
  Pair pair;
  char handle[kHandleBytes];
  CHECK_EQ(net().listen(nullptr, 0, handle, &pair.listener), kSuccess);
  {
    const test::NoDescriptors none;
    for (int i = 0; i < 50; ++i) {
      CHECK_EQ(net().connect(nullptr, 0, handle, &pair.sender, nullptr), kSuccess);
      CHECK_EQ(net().accept(pair.listener, &pair.receiver, nullptr), kSuccess);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT(pair.sender == nullptr && pair.receiver == nullptr);
    const std::vector<std::string> told = warnings();
    CHECK_EQ(told.size(), size_t{1});
    EXPECT(told.front().find("raise the limit") != std::string::npos);
  }
  meet(handle, &pair, 60);
  close(&pair);
  close(&first);
}

// Calls accept() until it has let go of all strangers.
void drain(void* listener, size_t descriptors) {
  const int64_t deadline = now_ns() + 60 * kNsPerS;
  while (open_descriptors() > descriptors) {
    void* receiver = nullptr;
    CHECK_EQ(net().accept(listener, &receiver, nullptr), kSuccess);
    CHECK(receiver == nullptr);
    CHECK(now_ns() < deadline);
  }
}

void check_transfer(const Pair& pair) {
  uint32_t in = 0;
  const uint32_t out = 0x12345678;
  void* request = receive(pair, &in, sizeof in);
  CHECK_EQ(finish(send(pair, &out, sizeof out)), kSuccess);
  CHECK_EQ(finish(request), kSuccess);
  EXPECT_EQ(in, out);
}

TEST(strangers_do_not_disturb) {
  Handle handle;
  Pair pair;
  CHECK_EQ(net().listen(nullptr, 0, &handle, &pair.listener), kSuccess);
  const size_t descriptors = open_descriptors();
  std::mt19937_64 random(1);
  std::vector<Fd> strangers;
  for (int i = 0; i < 300; ++i) {
    strangers.push_back(dial(handle));
    Hello hello = greeting(handle, 4, 0);
    if (i % 5 == 0) {  // wrong secret
      hello.nonce.bytes[i % 16] ^= 1;
      put(strangers.back(), &hello, sizeof hello);
    } else if (i % 5 == 1) {  // bytes by chance, or another protocol
      std::vector<uint8_t> noise = pattern(random() % 4096 + 1, static_cast<uint64_t>(i));
      if (i % 2 == 0) std::memcpy(noise.data(), "GET / HTTP/1.1", std::min<size_t>(noise.size(), 14));
      put(strangers.back(), noise.data(), noise.size());
    } else if (i % 5 == 2) {  // half a greeting
      put(strangers.back(), &hello, 20);
    } else if (i % 5 == 3) {  // right secret, impossible numbers
      hello.streams = static_cast<uint16_t>(random());
      hello.index = static_cast<uint16_t>(hello.streams + 1);
      put(strangers.back(), &hello, sizeof hello);
    }  // else: silence
    if (i >= 100) strangers[i - 100].reset();  // they come and go
    if (i % 3 == 0) {
      CHECK_EQ(net().accept(pair.listener, &pair.receiver, nullptr), kSuccess);
      CHECK(pair.receiver == nullptr);
    }
  }
  meet(&handle, &pair);
  check_transfer(pair);
  CHECK_EQ(net().close_send(pair.sender), kSuccess);
  CHECK_EQ(net().close_recv(pair.receiver), kSuccess);
  pair.sender = pair.receiver = nullptr;
  strangers.clear();
  drain(pair.listener, descriptors);
  // A listener that is beset closes.
  for (int i = 0; i < 60; ++i) strangers.push_back(dial(handle));
  for (int i = 0; i < 20; ++i) CHECK_EQ(net().accept(pair.listener, &pair.receiver, nullptr), kSuccess);
  close(&pair);
  strangers.clear();
  EXPECT_EQ(open_descriptors(), descriptors - 1);
}

// The greeting of the right peer, cut anywhere or with any bit changed, opens nothing.
TEST(a_right_beginning_is_not_enough) {
  Handle handle;
  Pair pair;
  CHECK_EQ(net().listen(nullptr, 0, &handle, &pair.listener), kSuccess);
  const Hello hello = greeting(handle, 1, 0);
  const std::string right(reinterpret_cast<const char*>(&hello), sizeof hello);
  for (size_t place = 0; place < right.size(); ++place) {
    std::string changed = right;
    changed[place] = static_cast<char>(changed[place] ^ 1 << place % 8);
    put(dial(handle), changed);
    if (place > 0) put(dial(handle), right.substr(0, place));
    CHECK_EQ(net().accept(pair.listener, &pair.receiver, nullptr), kSuccess);
    CHECK(pair.receiver == nullptr);
  }
  meet(&handle, &pair);
  check_transfer(pair);
  close(&pair);
}

TEST(a_listener_that_is_gone) {
  if (std::getenv("BAGUA_NET_CONNECT_TIMEOUT") == nullptr) test::skip("BAGUA_NET_CONNECT_TIMEOUT is not 1");
  Handle handle;
  void* listener = nullptr;
  CHECK_EQ(net().listen(nullptr, 0, &handle, &listener), kSuccess);
  CHECK_EQ(net().close_listen(listener), kSuccess);
  warnings();
  void* sender = nullptr;
  const int64_t deadline = now_ns() + 60 * kNsPerS;
  Result result = kSuccess;
  while (result == kSuccess) {
    result = net().connect(nullptr, 0, &handle, &sender, nullptr);
    CHECK(sender == nullptr);
    CHECK(now_ns() < deadline);
    std::this_thread::yield();
  }
  EXPECT(warned_of("127.0.0.1"));
}

// NCCL has no call that gives up connecting: it finalizes, a context for each communicator.
TEST(half_made_connections_go_with_the_last_context) {
  Pair first = connected();  // whatever is made once exists now
  close(&first);
  const size_t descriptors = open_descriptors();
  void* context = nullptr;
  CHECK_EQ(net().init(&context, 1, nullptr, nullptr, nullptr), kSuccess);
  for (int i = 0; i < 20; ++i) {
    Pair pair;
    char handle[kHandleBytes];
    CHECK_EQ(net().listen(nullptr, 0, handle, &pair.listener), kSuccess);
    CHECK_EQ(net().connect(nullptr, 0, handle, &pair.sender, nullptr), kSuccess);
    CHECK(pair.sender == nullptr);
    close(&pair);
  }
  EXPECT(open_descriptors() > descriptors);
  CHECK_EQ(net().finalize(context), kSuccess);
  EXPECT(open_descriptors() > descriptors);  // the other context is there
  CHECK_EQ(net().finalize(context), kSuccess);
  EXPECT_EQ(open_descriptors(), descriptors);
  CHECK_EQ(net().init(&context, 1, nullptr, nullptr, nullptr), kSuccess);
}

TEST(another_version_is_told) {
  for (const int other : {kProtocolVersion - 1, kProtocolVersion + 1}) {
    Handle handle;
    Pair pair;
    CHECK_EQ(net().listen(nullptr, 0, &handle, &pair.listener), kSuccess);
    warnings();
    const Fd socket = dial(handle);
    Hello hello = greeting(handle, 1, 0);
    hello.version = static_cast<uint16_t>(other);
    put(socket, &hello, sizeof hello);
    Answer answer{};
    const int64_t deadline = now_ns() + 30 * kNsPerS;
    while (::recv(socket.get(), &answer, sizeof answer, MSG_DONTWAIT) != sizeof answer) {
      CHECK_EQ(net().accept(pair.listener, &pair.receiver, nullptr), kSuccess);
      CHECK(pair.receiver == nullptr && now_ns() < deadline);
    }
    EXPECT(answer.accepted == 0 && answer.version == kProtocolVersion);
    EXPECT(warned_of("speaks version " + std::to_string(other) + " of the protocol, this process version " +
                     std::to_string(kProtocolVersion)));
    handle.version = static_cast<uint16_t>(other);
    EXPECT_EQ(net().connect(nullptr, 0, &handle, &pair.sender, nullptr), kInvalidArgument);
    EXPECT(warned_of("the handle is of version " + std::to_string(other) +
                     " of the protocol, this process speaks version " + std::to_string(kProtocolVersion) +
                     ": use the same bagua on all hosts"));
    EXPECT(pair.sender == nullptr);
    close(&pair);
  }
}

// Whichever byte is another, nobody is reached by it.
TEST(a_damaged_handle_leads_nowhere) {
  Handle handle;
  Pair pair;
  CHECK_EQ(net().listen(nullptr, 0, &handle, &pair.listener), kSuccess);
  for (size_t place = 0; place < offsetof(Handle, attempt); ++place) {
    Handle damaged = handle;
    auto* const byte = reinterpret_cast<uint8_t*>(&damaged) + place;
    if (*byte == 0 && place != offsetof(Handle, family)) continue;  // reserved
    *byte ^= 0x55;
    for (int i = 0; i < 20 && net().connect(nullptr, 0, &damaged, &pair.sender, nullptr) == kSuccess; ++i) {
      CHECK_EQ(net().accept(pair.listener, &pair.receiver, nullptr), kSuccess);
      CHECK(pair.sender == nullptr && pair.receiver == nullptr);
    }
  }
  meet(&handle, &pair);
  check_transfer(pair);
  close(&pair);
  void* context = nullptr;  // what still connects goes
  CHECK_EQ(net().finalize(nullptr), kSuccess);
  CHECK_EQ(net().init(&context, 1, nullptr, nullptr, nullptr), kSuccess);
}

// What a sender made by hand says, before it ends or stays, and what becomes of the request for message 0.
struct Forgery {
  std::string control, data;
  bool ends;
  Result result;
};

template <class T>
std::string raw(const T& value, size_t zeros) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value).append(zeros, '\0');
}

std::vector<Forgery> forgeries() {
  constexpr uint32_t kMark = SmallHeader::kMark, kMost = SmallHeader::kMostBytes, kChunk = Header::kChunk;
  std::vector<Forgery> all;
  for (const SmallHeader& header : {SmallHeader{0, 0},             // no mark
                                    {kChunk, 1},                   // of the other kind of socket
                                    {kMark ^ 0x80000000, 0},       // a bit of the mark is wrong
                                    {kMark | 65, 0},               // larger than the buffer
                                    {kMark | kMost, 0},            // far larger
                                    {kMark, 0x80000000},           // so far ahead that it goes back
                                    {kMark | kMost, UINT32_MAX}})  // before the first
    all.push_back({raw(header, kPaddedBytes - sizeof header), "", false, kInternalError});
  const std::string begun = raw(Header{kChunk, 8, 0, 0, 64}, 8);
  for (const Header& header : {Header{0, 1, 0, 0, 64},              // no kind
                               {kChunk, 0, 0, 0, 64},               // empty
                               {kChunk, 65, 0, 0, 64},              // beyond the end
                               {kChunk, 8, 0, 60, 64},              //
                               {kChunk, 8, 0, UINT64_MAX - 4, 64},  // beyond all numbers
                               {kChunk, 8, 0, 8, 63},               // another size than that of the first
                               {kChunk, 64, 0, 0, 1 << 20}})        // larger than the buffer
    all.push_back({"", begun + raw(header, 0), false, kInternalError});
  const std::string part = raw(Header{kChunk, 40, 0, 0, 64}, 40);
  all.push_back({"", part + part, false, kInternalError});                         // the same bytes twice
  all.push_back({small_header(0, 64), begun, false, kInternalError});              // a message in both forms
  all.push_back({"", raw(Header{kChunk, 8, 1, 0, 8}, 8), true, kRemoteError});     // message 0 is lost
  all.push_back({"", raw(Header{kChunk, 64, 0, 0, 64}, 10), true, kRemoteError});  // ends in the middle of a chunk
  return all;
}

TEST(forgeries_are_errors) {
  for (const Forgery& one : forgeries()) {
    Forged forged;
    char buffer[64];
    void* request = forged.receive(buffer, sizeof buffer);
    put(forged.data, one.data);
    int done = 0;
    if (!one.control.empty() && !one.data.empty()) CHECK_EQ(net().test(request, &done, nullptr), kSuccess);
    put(forged.control, one.control);
    if (one.ends) forged.control.reset(), forged.data.reset();
    EXPECT_EQ(finish(request), one.result);
  }
}

TEST(small_messages_that_go_back_are_an_error) {
  const Forged forged;
  void* first = forged.receive(nullptr, 0);
  void* second = forged.receive(nullptr, 0);
  put(forged.control, small_header(1, 0) + small_header(0, 0));
  EXPECT_EQ(finish(first), kInternalError);
  EXPECT_EQ(finish(second), kSuccess);  // it was complete before
}

TEST(small_messages_pass_large_ones_of_which_nothing_came) {
  const Forged forged;
  char large_in[64] = {};
  char small_in[4] = {};
  void* large = forged.receive(large_in, sizeof large_in);
  void* small = forged.receive(small_in, sizeof small_in);
  put(forged.control, small_header(1, 4));
  put(forged.control, "abc", 4);
  put(forged.control, small_header(2, 0));  // waits for its buffer
  EXPECT_EQ(finish(small), kSuccess);
  EXPECT_EQ(std::string(small_in), "abc");
  int done = 0;
  CHECK_EQ(net().test(large, &done, nullptr), kSuccess);
  EXPECT_EQ(done, 0);
  void* last = forged.receive(nullptr, 0);
  EXPECT_EQ(finish(last), kSuccess);
  const Header chunk{Header::kChunk, 4, 0, 0, 4};
  put(forged.data, &chunk, sizeof chunk);
  put(forged.data, "def", 4);
  EXPECT_EQ(finish(large), kSuccess);
  EXPECT_EQ(std::string(large_in), "def");
}

TEST(headers_cut_anywhere_are_read) {
  const Forged forged;
  char buffer[100] = {};
  char text[] = "a message of some length, cut into single bytes on its way";
  void* request = forged.receive(buffer, sizeof buffer);
  const Header chunk{Header::kChunk, sizeof text, 0, 0, sizeof text};
  const std::string bytes = raw(chunk, 0).append(text, sizeof text);
  int done = 0;
  for (const char byte : bytes) {
    CHECK_EQ(net().test(request, &done, nullptr), kSuccess);
    CHECK_EQ(done, 0);
    put(forged.data, &byte, 1);
  }
  EXPECT_EQ(finish(request), kSuccess);
  EXPECT_EQ(std::string(buffer), text);
}

}  // namespace
}  // namespace bagua::nccl_net::rig

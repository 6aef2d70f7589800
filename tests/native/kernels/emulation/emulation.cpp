// Fibers for cuda_runtime.h of this folder. One operating-system thread; a fiber is left at a meeting whose members
// have not all come, and taken up again in turn.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda_pipeline_primitives.h"
#include "cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace bagua::cuda {
// Dynamic shared memory, as the kernels name it.
thread_local uint4 dynamic_shared[emulation::kMostShared / sizeof(uint4)];
}  // namespace bagua::cuda

namespace emulation {

Position here;
std::set<const void*> loaded, launched;

unsigned char* dynamic_shared_of_block() {
  return reinterpret_cast<unsigned char*>(bagua::cuda::dynamic_shared);
}

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr int kMostThreads = 1024;

#if defined(__x86_64__)
// Saves what a call has to keep on the old stack and goes on with the new one; ucontext would make two system calls.
extern "C" void emulation_switch(void** old_stack, void* new_stack);
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
)");
struct Context {
  void* stack_pointer = nullptr;
};
void switch_context(Context& from, Context& to) {
  emulation_switch(&from.stack_pointer, to.stack_pointer);
}
void prepare(Context& context, char* stack, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + kStackBytes) - 3;  // so that the stack is aligned as after a call
  *top = nullptr;  // the return address of entry(), which does not return
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}
#else
struct Context {
  ucontext_t saved;
};
void switch_context(Context& from, Context& to) {
  swapcontext(&from.saved, &to.saved);
}
void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = kStackBytes;
  makecontext(&context.saved, entry, 0);
}
#endif

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  Meeting waits_for = Meeting::kNone;
  unsigned meetings_of_warp = 0;
  bool ended = false;
  std::vector<Copy> copies;  // begun, not waited for
};

struct Warp {
  uint32_t values[2][32];  // a lane may come to the next meeting before another has read from this one
  int arrived = 0;
  Meeting meeting = Meeting::kNone;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned threads = 0;
  unsigned arrived = 0;
  unsigned ended = 0;
  Body body = nullptr;
  void* body_context = nullptr;
} block;

int order_of_threads = 0;
Context scheduler;
#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulation: block %u, thread %u: %s\n", here.block.x, here.thread.x, what);
  std::abort();
}

Fiber& current() {
  return block.fibers[here.thread.x];
}

// Back to the scheduler, until it comes again. `last`: it does not, so nothing may stay marked on the stack.
__attribute__((no_sanitize_address, noinline)) void leave(bool last) {
  Fiber& fiber = current();
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, scheduler_stack, scheduler_stack_bytes);
  switch_context(fiber.context, scheduler);
  __sanitizer_finish_switch_fiber(fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#else
  static_cast<void>(last);
  switch_context(fiber.context, scheduler);
#endif
}

__attribute__((no_sanitize_address)) void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  block.body(block.body_context);
  if (!current().copies.empty()) fail("ends before its copies to shared memory have arrived");
  current().ended = true;
  ++block.ended;
  leave(true);
  std::abort();
}

void enter(unsigned thread) {
  here.thread.x = thread;
  Fiber& fiber = block.fibers[thread];
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, fiber.stack, kStackBytes);
  switch_context(scheduler, fiber.context);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
  switch_context(scheduler, fiber.context);
#endif
}

char* new_stack() {
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for a stack");
  return static_cast<char*>(memory);
}

void run_block(unsigned threads) {
  block.threads = threads;
  block.arrived = block.ended = 0;
  if (block.fibers.size() < threads) block.fibers.resize(threads);
  block.warps.assign(threads / 32, Warp{});
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = block.fibers[t];
    if (fiber.stack == nullptr) fiber.stack = new_stack();
    fiber.waits_for = Meeting::kNone;
    fiber.meetings_of_warp = 0;
    fiber.ended = false;
    prepare(fiber.context, fiber.stack, fiber_main);
  }
  while (block.ended < threads) {
    bool moved = false;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = order_of_threads == 0 ? i : threads - 1 - i;
      if (block.fibers[t].ended || block.fibers[t].waits_for != Meeting::kNone) continue;
      enter(t);
      moved = true;
    }
    if (!moved) fail("everybody waits for somebody: not all threads come to a meeting");
  }
}

}  // namespace

void set_order(int order) {
  order_of_threads = order;
}

const uint32_t* exchange(Meeting meeting, uint32_t value) {
  Fiber& fiber = current();
  const unsigned warp_number = here.thread.x / 32;
  Warp& warp = block.warps[warp_number];
  if (warp.arrived > 0 && warp.meeting != meeting) fail("lanes of a warp meet in different operations");
  const unsigned side = fiber.meetings_of_warp++ % 2;
  warp.values[side][here.thread.x % 32] = value;
  warp.meeting = meeting;
  if (++warp.arrived < 32) {
    fiber.waits_for = meeting;
    leave(false);
  } else {
    warp.arrived = 0;
    for (unsigned l = 0; l < 32; ++l) block.fibers[warp_number * 32 + l].waits_for = Meeting::kNone;
  }
  return warp.values[side];
}

void begin_copy(void* to, const void* from, size_t bytes) {
  current().copies.push_back({to, from, bytes});
}

void finish_copies() {
  for (const Copy& copy : current().copies) std::memcpy(copy.to, copy.from, copy.bytes);
  current().copies.clear();
}

void meet_block() {
  Fiber& fiber = current();
  if (++block.arrived < block.threads) {
    fiber.waits_for = Meeting::kBlock;
    leave(false);
    return;
  }
  block.arrived = 0;
  for (unsigned t = 0; t < block.threads; ++t) block.fibers[t].waits_for = Meeting::kNone;
}

void run_grid(unsigned blocks, unsigned threads, size_t shared_bytes, Body body, void* context) {
  if (blocks == 0 || threads == 0 || threads > kMostThreads || threads % 32 != 0) fail("a grid of no such size");
  if (shared_bytes > kMostShared) fail("more shared memory than a block can have");
  block.body = body;
  block.body_context = context;
  here.block_size.x = threads;
  here.grid_size.x = blocks;
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(dynamic_shared_of_block() + shared_bytes, kMostShared - shared_bytes);
#endif
  for (unsigned b = 0; b < blocks; ++b) {
    here.block.x = b;
    run_block(threads);
  }
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(dynamic_shared_of_block(), kMostShared);
#endif
}

}  // namespace emulation

// Runs those steps of a program that compute or copy. The engine's executors and the tests' simulator use it.
#pragma once

#include <vector>

#include "collective/program.h"

namespace bagua::collective {

// The memory of one operation at one host: by local member; nullptr if the member gave no buffer.
struct Memory {
  std::vector<const char*> src;
  std::vector<char*> dst;
  char* scratch = nullptr;   // aligned to 64 bytes
  char* residual = nullptr;  // Request::count float32, if the request has error feedback: written, and read if there is
  const char* carried = nullptr;  // no other to read
};

const char* source_of(const Memory& memory, const Ref& ref);
char* target_of(const Memory& memory, const Ref& ref);

// Runs a step that computes. `divisor` is the number of ranks of the communicator. `streaming`: use non-temporal stores
// if no destination is a source, for results that nobody reads soon.
void run_step(const Program& program, const Step& step, const Request& request, int64_t divisor, const Memory& memory,
              bool streaming);

}  // namespace bagua::collective

// Tables of the functions of all libraries that the leg opens at run time.
#pragma once

#include <map>
#include <string>

#include "base/status.h"
#include "gpu/kernels/kernels.h"
#include "gpu/leg/api/cuda_types.h"
#include "gpu/leg/api/nccl_types.h"

namespace bagua::device {

// Immutable once the leg is open, so any thread may use it.
struct Libraries {
  CudaRuntime cuda{};
  CudaDriver driver{};
  Nccl nccl{};
  BaguaKernels kernels{};

  std::map<std::string, std::string> paths;    // path of "cudart", "driver", "nccl", "kernels"
  std::map<std::string, std::string> why_not;  // the same names: why the library is missing
  int nccl_version = 0;                        // 22809: 2.28.9

  bool has_cuda() const { return cuda.get_device != nullptr; }
  bool has_nccl() const { return nccl.init_rank != nullptr; }
  bool has_kernels() const { return kernels.transcode != nullptr; }
  bool has_wait_value() const { return driver.wait_value != nullptr; }

  // Marks the kernels as missing, for the reason "<path> <why>".
  void give_up_kernels(const std::string& why);
};

// Opens the libraries that it finds. A library that lacks a function counts as missing, with the reason. `kernels` is
// the path of libbagua_kernels.so; "": none.
Libraries open_libraries(const std::string& kernels);

}  // namespace bagua::device

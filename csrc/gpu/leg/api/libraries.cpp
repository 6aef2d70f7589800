#include "gpu/leg/api/libraries.h"

#include "base/library.h"

namespace bagua::device {

namespace {

void fill_cuda(LibraryTable* f, CudaRuntime* t) {
  f->need(&t->get_device, {"cudaGetDevice"});
  f->need(&t->set_device, {"cudaSetDevice"});
  f->need(&t->pci_bus_id, {"cudaDeviceGetPCIBusId"});
  f->need(&t->priority_range, {"cudaDeviceGetStreamPriorityRange"});
  f->need(&t->stream_create, {"cudaStreamCreateWithPriority"});
  f->need(&t->stream_destroy, {"cudaStreamDestroy"});
  f->need(&t->stream_query, {"cudaStreamQuery"});
  f->need(&t->stream_synchronize, {"cudaStreamSynchronize"});
  f->need(&t->stream_wait_event, {"cudaStreamWaitEvent"});
  f->need(&t->stream_capturing, {"cudaStreamIsCapturing"});
  f->need(&t->capture_mode, {"cudaThreadExchangeStreamCaptureMode"});
  f->need(&t->event_create, {"cudaEventCreateWithFlags"});
  f->need(&t->event_destroy, {"cudaEventDestroy"});
  f->need(&t->event_record, {"cudaEventRecord"});
  f->need(&t->event_query, {"cudaEventQuery"});
  f->need(&t->event_synchronize, {"cudaEventSynchronize"});
  f->need(&t->copy, {"cudaMemcpyAsync"});
  f->need(&t->set, {"cudaMemsetAsync"});
  f->need(&t->host_function, {"cudaLaunchHostFunc"});
  f->need(&t->host_register, {"cudaHostRegister"});
  f->need(&t->host_unregister, {"cudaHostUnregister"});
  f->need(&t->host_address, {"cudaHostGetDevicePointer"});
  f->need(&t->allocate, {"cudaMalloc"});
  f->need(&t->release, {"cudaFree"});
  f->need(&t->error_text, {"cudaGetErrorString"});
}

// Uses cuStreamWaitValue32_v2: the first version needs a parameter of the kernel module.
void fill_driver(LibraryTable* f, CudaDriver* t) {
  f->need(&t->init, {"cuInit"});
  f->need(&t->device, {"cuDeviceGet"});
  f->need(&t->retain, {"cuDevicePrimaryCtxRetain"});
  f->need(&t->release, {"cuDevicePrimaryCtxRelease_v2"});
  f->need(&t->push, {"cuCtxPushCurrent_v2"});
  f->need(&t->pop, {"cuCtxPopCurrent_v2"});
  f->need(&t->wait_value, {"cuStreamWaitValue32_v2"});
}

void fill_nccl(LibraryTable* f, Nccl* t) {
  f->need(&t->version, {"ncclGetVersion"});
  f->need(&t->unique_id, {"ncclGetUniqueId"});
  f->need(&t->init_rank, {"ncclCommInitRankConfig"});
  f->need(&t->finalize, {"ncclCommFinalize"});
  f->need(&t->destroy, {"ncclCommDestroy"});
  f->need(&t->abort, {"ncclCommAbort"});
  f->need(&t->async_error, {"ncclCommGetAsyncError"});
  f->need(&t->error_text, {"ncclGetErrorString"});
  f->need(&t->group_start, {"ncclGroupStart"});
  f->need(&t->group_end, {"ncclGroupEnd"});
  f->need(&t->all_reduce, {"ncclAllReduce"});
  f->need(&t->reduce, {"ncclReduce"});
  f->need(&t->broadcast, {"ncclBroadcast"});
  f->need(&t->all_gather, {"ncclAllGather"});
  f->need(&t->reduce_scatter, {"ncclReduceScatter"});
  f->need(&t->send, {"ncclSend"});
  f->need(&t->recv, {"ncclRecv"});
  f->need(&t->last_error, {"ncclGetLastError"});
}

void fill_kernels(LibraryTable* f, BaguaKernels* t) {
  f->need(&t->version, {"bagua_kernels_version"});
  f->need(&t->load, {"bagua_kernels_load"});
  f->need(&t->transcode, {"bagua_kernels_transcode"});
  f->need(&t->reduce, {"bagua_kernels_reduce"});
}

// Fills a table completely or leaves it empty.
template <class Table>
void take(const char* name, const char* variable, const std::vector<std::string>& files,
          void (*fill)(LibraryTable*, Table*), Table* table, Libraries* out, Library* library) {
  if (Status status = Library::open(variable, files, library); !status) {
    out->why_not[name] = status.message();
    return;
  }
  LibraryTable filler(*library);
  fill(&filler, table);
  if (filler.missing().empty()) {
    out->paths[name] = library->path();
  } else {
    *table = Table{};
    out->why_not[name] = library->path() + " has no " + filler.missing();
  }
}

void check_nccl(Libraries* out, const Library& library) {
  if (!out->has_nccl()) return;
  if (out->nccl.version(&out->nccl_version) != kNcclOk || out->nccl_version < 21400) {
    out->why_not["nccl"] = out->paths["nccl"] + " is version " + std::to_string(out->nccl_version) +
                           "; 2.14 or later is needed (communicators that don't block)";
    out->paths.erase("nccl");
    out->nccl = Nccl{};
    return;
  }
  // The version is looked at, too, as a library may have a function that its version does not promise yet.
  if (out->nccl_version >= 21800) LibraryTable(library).need(&out->nccl.split, {"ncclCommSplit"});
}

void check_kernels(Libraries* out) {
  if (!out->has_kernels()) return;
  const uint32_t version = out->kernels.version();
  if (version == BAGUA_KERNELS_VERSION) return;
  out->give_up_kernels("has version " + std::to_string(version) + ", version " + std::to_string(BAGUA_KERNELS_VERSION) +
                       " is needed: build it again");
}

}  // namespace

void Libraries::give_up_kernels(const std::string& why) {
  why_not["kernels"] = paths["kernels"] + " " + why;
  paths.erase("kernels");
  kernels = BaguaKernels{};
}

Libraries open_libraries(const std::string& kernels) {
  Libraries out;
  Library cuda, driver, nccl, codecs;
  take<CudaRuntime>("cudart", "BAGUA_DEVICE_CUDART",
                    {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"}, fill_cuda, &out.cuda,
                    &out, &cuda);
  take<CudaDriver>("driver", "BAGUA_DEVICE_DRIVER", {"libcuda.so.1"}, fill_driver, &out.driver, &out, &driver);
  take<Nccl>("nccl", "BAGUA_DEVICE_NCCL", {"libnccl.so.2"}, fill_nccl, &out.nccl, &out, &nccl);
  const std::vector<std::string> files = kernels.empty() ? std::vector<std::string>{} : std::vector{kernels};
  take<BaguaKernels>("kernels", "BAGUA_DEVICE_KERNELS", files, fill_kernels, &out.kernels, &out, &codecs);
  check_nccl(&out, nccl);
  check_kernels(&out);
  return out;
}

}  // namespace bagua::device

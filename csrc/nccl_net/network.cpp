// The plugin's functions, and the tables of them that NCCL looks up by name: version 11 of the interface, for NCCL from
// 2.28 on, and version 8, with thin adapters, for NCCL from 2.20 on. The functions throw no exceptions and never wait
// for a peer.
#include <atomic>
#include <exception>
#include <map>
#include <memory>

#include "base/clock.h"
#include "nccl_net/connector.h"
#include "nccl_net/devices.h"
#include "nccl_net/listener.h"
#include "nccl_net/log.h"
#include "nccl_net/nccl_net_abi.h"
#include "nccl_net/receive.h"
#include "nccl_net/send.h"
#include "nccl_net/settings.h"

namespace bagua::nccl_net {
namespace {

constexpr char kPluginName[] = "Bagua-Net";

// The target of NCCL's memory handles.
struct Registration {
  const char* data;
  size_t size;
};

// NCCL's connection handles are Connection*.
SendConnection* sender(void* comm) {
  return static_cast<SendConnection*>(static_cast<Connection*>(comm));
}

ReceiveConnection* receiver(void* comm) {
  return static_cast<ReceiveConnection*>(static_cast<Connection*>(comm));
}

std::atomic<int> contexts{0};  // calls of init() minus calls of finalize()

// Found by the first init() and never freed, because NCCL keeps pointers to the names.
const std::vector<Device>& all_devices() {
  static const auto* const found = new std::vector<Device>(find_devices());
  return *found;
}

const Device* device_at(int index) {
  const std::vector<Device>& all = all_devices();
  if (index >= 0 && static_cast<size_t>(index) < all.size()) return &all[static_cast<size_t>(index)];
  BAGUA_NET_WARN("there is no device " + std::to_string(index) + ": " + std::to_string(all.size()) + " were found");
  return nullptr;
}

// Connections that connect() has begun and for which NCCL will call again. Old ones are dropped: NCCL has given up.
class Attempts {
 public:
  static Attempts& instance() {
    static auto* const instance = new Attempts;
    return *instance;
  }

  // Returns nullptr if no attempt has this number and handle.
  std::unique_ptr<Connector> take(const Handle& handle) {
    const Lock lock(mutex_);
    const auto found = waiting_.find(handle.attempt);
    if (found == waiting_.end() || !found->second->is_for(handle)) return nullptr;
    std::unique_ptr<Connector> out = std::move(found->second);
    waiting_.erase(found);
    return out;
  }

  uint64_t put(std::unique_ptr<Connector> connector) {
    const Lock lock(mutex_);
    drop_older_than(now_ns() - kForgottenNs);
    waiting_[++last_] = std::move(connector);
    return last_;
  }

  void drop_all() {
    const Lock lock(mutex_);
    waiting_.clear();
  }

 private:
  static constexpr int64_t kForgottenNs = 60 * kNsPerS;

  void drop_older_than(int64_t limit) REQUIRES(mutex_) {
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      at = at->second->stepped_ns() < limit ? waiting_.erase(at) : std::next(at);
    }
  }

  Mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Connector>> waiting_ GUARDED_BY(mutex_);
  uint64_t last_ GUARDED_BY(mutex_) = 0;
};

Result result_of(Code code) {
  switch (code) {
    case Code::kOk:
      return kSuccess;
    case Code::kInvalid:
      return kInvalidArgument;
    case Code::kUnavailable:
    case Code::kTimeout:
    case Code::kCorrupt:
      return kRemoteError;
    default:
      return kSystemError;
  }
}

Result told(const std::string& what, const Status& status) {
  BAGUA_NET_WARN(what + ": " + status.message());
  return result_of(status.code());
}

// Catches exceptions, because NCCL is called from C. The only possible one is std::bad_alloc.
template <class F>
Result guarded(const char* name, F body) {
  try {
    return body();
  } catch (const std::exception& error) {
    BAGUA_NET_WARN(std::string(name) + ": " + error.what());
    return kSystemError;
  }
}

Result init(void** context, uint64_t, CommConfig*, Logger logger, ProfilerCallback) {
  set_logger(logger);
  static_cast<void>(settings());
  if (context != nullptr) *context = &contexts;  // contexts have no state of their own
  if (all_devices().empty()) return kSystemError;
  contexts.fetch_add(1);
  return kSuccess;
}

Result devices(int* count) {
  if (count == nullptr) return kInvalidArgument;
  *count = static_cast<int>(all_devices().size());
  return kSuccess;
}

Result get_properties(int device, PropertiesV11* properties) {
  const Device* found = device_at(device);
  if (found == nullptr || properties == nullptr) return kInvalidArgument;
  *properties = {};
  properties->name = const_cast<char*>(found->name.c_str());
  properties->pci_path = found->pci_path.empty() ? nullptr : const_cast<char*>(found->pci_path.c_str());
  properties->guid = static_cast<uint64_t>(device);
  properties->ptr_support = kPtrHost;
  properties->speed = found->speed;
  properties->max_comms = 65536;
  properties->max_recvs = 1;
  properties->net_device_type = kDeviceHost;
  properties->virtual_device.count = 1;
  properties->virtual_device.devices[0] = device;
  properties->max_p2p_bytes = kMaxMessageBytes;
  properties->max_collective_bytes = kMaxMessageBytes;
  properties->max_multi_request_size = 1;
  return kSuccess;
}

Result listen(void*, int device, void* handle, void** listen_comm) {
  const Device* found = device_at(device);
  if (found == nullptr || handle == nullptr || listen_comm == nullptr) return kInvalidArgument;
  return guarded("listen", [&] {
    Handle filled;
    std::unique_ptr<Listener> listener;
    const Status status = Listener::open(*found, &filled, &listener);
    if (!status) return told("listen on " + found->name, status);
    std::memcpy(handle, &filled, sizeof filled);
    *listen_comm = listener.release();
    return kSuccess;
  });
}

Result connect(void*, int device, void* handle, void** send_comm, DeviceHandle**) {
  const Device* found = device_at(device);
  if (found == nullptr || handle == nullptr || send_comm == nullptr) return kInvalidArgument;
  *send_comm = nullptr;
  return guarded("connect", [&] {
    Handle copy;
    std::memcpy(&copy, handle, sizeof copy);
    std::unique_ptr<Connector> connector = Attempts::instance().take(copy);
    if (connector == nullptr) {
      Address address;
      if (const Status status = handle_address(copy, *found, &address); !status) return told("connect", status);
      connector = std::make_unique<Connector>(copy, address);
    }
    std::unique_ptr<SendConnection> connection;
    if (const Status status = connector->step(&connection); !status) return told("connect", status);
    // NCCL keeps the handle for the next call; a number in it identifies the attempt.
    copy.attempt = connection == nullptr ? Attempts::instance().put(std::move(connector)) : 0;
    std::memcpy(handle, &copy, sizeof copy);
    *send_comm = static_cast<Connection*>(connection.release());
    return kSuccess;
  });
}

Result accept(void* listen_comm, void** recv_comm, DeviceHandle**) {
  if (listen_comm == nullptr || recv_comm == nullptr) return kInvalidArgument;
  *recv_comm = nullptr;
  return guarded("accept", [&] {
    std::unique_ptr<ReceiveConnection> connection;
    const Status status = static_cast<Listener*>(listen_comm)->accept(&connection);
    if (!status) return told("accept", status);
    *recv_comm = static_cast<Connection*>(connection.release());
    return kSuccess;
  });
}

Result reg_mr(void* comm, void* data, size_t size, int type, void** mhandle) {
  if (comm == nullptr || mhandle == nullptr) return kInvalidArgument;
  if (type != kPtrHost) {
    BAGUA_NET_WARN("memory of kind " + std::to_string(type) + " can't be used: sockets carry host memory only");
    return kInvalidUsage;
  }
  return guarded("regMr", [&] {  // sockets need no registration: it only tells when NCCL takes memory back
    *mhandle = new Registration{static_cast<const char*>(data), size};
    return kSuccess;
  });
}

Result reg_mr_dma_buf(void*, void*, size_t, int, uint64_t, int, void**) {
  BAGUA_NET_WARN("DMA-BUF memory can't be used: sockets carry host memory only");
  return kInvalidUsage;
}

// NCCL frees its buffers after this call and closes the connection later, so helpers must stop using them now.
Result dereg_mr(void* comm, void* mhandle) {
  if (comm == nullptr || mhandle == nullptr) return kSuccess;  // there is no registration
  return guarded("deregMr", [&] {
    const std::unique_ptr<Registration> ended(static_cast<Registration*>(mhandle));
    static_cast<Connection*>(comm)->withdraw(ended->data, ended->size);
    return kSuccess;
  });
}

Result isend(void* send_comm, void* data, size_t size, int, void*, void*, void** request) {
  if (send_comm == nullptr || request == nullptr || (data == nullptr && size > 0) || size > kMaxMessageBytes) {
    return kInvalidArgument;
  }
  *request = nullptr;
  return guarded("isend", [&] {
    Request* begun = nullptr;
    const Result result = sender(send_comm)->isend(data, size, &begun);
    *request = begun;
    return result;
  });
}

Result irecv(void* recv_comm, int n, void** data, size_t* sizes, int*, void**, void**, void** request) {
  if (recv_comm == nullptr || request == nullptr || data == nullptr || sizes == nullptr) return kInvalidArgument;
  *request = nullptr;
  if (n != 1) {
    BAGUA_NET_WARN("irecv for " + std::to_string(n) + " buffers at once: the properties allow 1");
    return kInvalidUsage;
  }
  if ((data[0] == nullptr && sizes[0] > 0) || sizes[0] > kMaxMessageBytes) return kInvalidArgument;
  return guarded("irecv", [&] {
    Request* begun = nullptr;
    const Result result = receiver(recv_comm)->irecv(data[0], sizes[0], &begun);
    *request = begun;
    return result;
  });
}

Result iflush(void*, int, void**, int*, void**, void** request) {
  if (request == nullptr) return kInvalidArgument;
  *request = nullptr;  // nothing to flush: complete messages are in host memory already
  return kSuccess;
}

Result test(void* request, int* done, int* sizes) {
  if (request == nullptr || done == nullptr) return kInvalidArgument;
  *done = 0;
  auto* begun = static_cast<Request*>(request);
  return guarded("test", [&] { return begun->owner->test(begun, done, sizes); });
}

Result close_send(void* comm) {
  return guarded("closeSend", [&] { return delete sender(comm), kSuccess; });
}

Result close_recv(void* comm) {
  return guarded("closeRecv", [&] { return delete receiver(comm), kSuccess; });
}

Result close_listen(void* comm) {
  return guarded("closeListen", [&] { return delete static_cast<Listener*>(comm), kSuccess; });
}

Result finalize(void*) {
  return guarded("finalize", [] {
    if (contexts.fetch_sub(1) == 1) Attempts::instance().drop_all();
    return kSuccess;
  });
}

Result set_net_attributes(void*, NetAttributes*) {
  return kSuccess;
}

// Version 8 has no context.
Result init_v8(Logger logger) {
  return init(nullptr, 0, nullptr, logger, nullptr);
}

Result get_properties_v8(int device, PropertiesV8* properties) {
  PropertiesV11 all{};
  if (properties == nullptr) return kInvalidArgument;
  if (const Result result = get_properties(device, &all); result != kSuccess) return result;
  *properties = {all.name, all.pci_path, all.guid,      all.ptr_support, all.reg_is_global,   all.speed,
                 all.port, all.latency,  all.max_comms, all.max_recvs,   all.net_device_type, all.net_device_version};
  return kSuccess;
}

Result listen_v8(int device, void* handle, void** listen_comm) {
  return listen(nullptr, device, handle, listen_comm);
}

Result connect_v8(int device, void* handle, void** send_comm, DeviceHandle** offload) {
  return connect(nullptr, device, handle, send_comm, offload);
}

Result isend_v8(void* send_comm, void* data, int size, int tag, void* mhandle, void** request) {
  if (size < 0) return kInvalidArgument;
  return isend(send_comm, data, static_cast<size_t>(size), tag, mhandle, nullptr, request);
}

Result irecv_v8(void* recv_comm, int n, void** data, int* sizes, int* tags, void** mhandles, void** request) {
  if (n != 1 || sizes == nullptr || sizes[0] < 0) return kInvalidArgument;
  size_t wide = static_cast<size_t>(sizes[0]);
  return irecv(recv_comm, n, data, &wide, tags, mhandles, nullptr, request);
}

}  // namespace
}  // namespace bagua::nccl_net

#define BAGUA_NET_EXPORT __attribute__((visibility("default")))

// getDeviceMr, irecvConsumed and makeVDevice are NULL: there is no offload to the GPU, and interfaces are not merged.
using namespace bagua::nccl_net;
extern "C" {
BAGUA_NET_EXPORT NetV8 ncclNetPlugin_v8{
    kPluginName, init_v8,        devices,      get_properties_v8, listen_v8, connect_v8, accept,
    reg_mr,      reg_mr_dma_buf, dereg_mr,     isend_v8,          irecv_v8,  iflush,     test,
    close_send,  close_recv,     close_listen, nullptr,           nullptr};
BAGUA_NET_EXPORT NetV11 ncclNetPlugin_v11{
    kPluginName, init,    devices,        get_properties,    listen,       connect,
    accept,      reg_mr,  reg_mr_dma_buf, dereg_mr,          isend,        irecv,
    iflush,      test,    close_send,     close_recv,        close_listen, nullptr,
    nullptr,     nullptr, finalize,       set_net_attributes};
}

#include "nccl_net/network.h"

#include <mutex>

#include "nccl_net/devices.h"
#include "nccl_net/log.h"
#include "nccl_net/settings.h"

namespace bagua::nccl_net {

const char kPluginName[] = "Bagua-Net";

namespace {

// Found at the first init() and kept: NCCL holds pointers to the names.
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

}  // namespace

Result init(void** context, uint64_t, CommConfig*, Logger logger, ProfilerCallback) {
  set_logger(logger);
  static_cast<void>(settings());
  if (context != nullptr) *context = nullptr;
  return all_devices().empty() ? kSystemError : kSuccess;
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

Result set_net_attributes(void*, NetAttributes*) {
  return kSuccess;
}

}  // namespace bagua::nccl_net
namespace bagua::nccl_net {
Result listen(void*, int, void*, void**) {
  return kInternalError;
}
Result connect(void*, int, void*, void**, DeviceHandle**) {
  return kInternalError;
}
Result accept(void*, void**, DeviceHandle**) {
  return kInternalError;
}
Result reg_mr(void*, void*, size_t, int, void**) {
  return kInternalError;
}
Result reg_mr_dma_buf(void*, void*, size_t, int, uint64_t, int, void**) {
  return kInternalError;
}
Result dereg_mr(void*, void*) {
  return kInternalError;
}
Result isend(void*, void*, size_t, int, void*, void*, void**) {
  return kInternalError;
}
Result irecv(void*, int, void**, size_t*, int*, void**, void**, void**) {
  return kInternalError;
}
Result iflush(void*, int, void**, int*, void**, void**) {
  return kInternalError;
}
Result test(void*, int*, int*) {
  return kInternalError;
}
Result close_send(void*) {
  return kInternalError;
}
Result close_recv(void*) {
  return kInternalError;
}
Result close_listen(void*) {
  return kInternalError;
}
Result finalize(void*) {
  return kSuccess;
}
}  // namespace bagua::nccl_net

#include "channel/host_api.h"

#include <algorithm>
#include <cstring>

#include "base/error_codes.h"
#include "channel/client.h"
#include "channel/transfer.h"
#include "codec/codec.h"
#include "kernel/reduce.h"

namespace bagua {

namespace {

int told(const Status& status, HostError* error) {
  if (status) return kHostOk;
  const std::string text = coded(status);
  const size_t length = std::min(text.size(), sizeof(error->text) - 1);
  memcpy(error->text, text.data(), length);
  error->text[length] = '\0';
  if (status.code() == Code::kTimeout) return kHostTimeout;
  return status.code() == Code::kAborted ? kHostInterrupted : kHostFailed;
}

int submit(ChannelClient* client, const Descriptor* descriptor, uint64_t* ticket, HostError* error) {
  return told(client->submit(*descriptor, ticket), error);
}

ChannelClient::Interrupt interrupt_of(bool (*interrupted)(void*), void* context) {
  return [=] { return interrupted != nullptr && interrupted(context); };
}

int wait(ChannelClient* client, uint64_t ticket, int64_t deadline_ns, bool (*interrupted)(void*), void* context,
         HostError* error) {
  ChannelClient::Times times;
  return told(client->wait(ticket, deadline_ns, interrupt_of(interrupted, context), &times), error);
}

int alloc(ChannelClient* client, uint64_t bytes, uint64_t* segment, void** data, uint64_t* size, HostError* error) {
  ChannelClient::Allocation allocation;
  if (Status status = client->alloc(bytes, &allocation); !status) return told(status, error);
  *segment = allocation.id;
  *data = allocation.memory->data();
  *size = allocation.memory->bytes();
  client->keep(std::move(allocation));
  return kHostOk;
}

int free_segment(ChannelClient* client, uint64_t segment, HostError* error) {
  return told(client->free_segment(segment), error);
}

int create_comm(ChannelClient* client, uint32_t comm, const int32_t* ranks, size_t count, int64_t timeout_ns,
                HostError* error) {
  return told(client->create_comm(comm, std::vector<int>(ranks, ranks + count), timeout_ns), error);
}

int destroy_comm(ChannelClient* client, uint32_t comm, HostError* error) {
  return told(client->destroy_comm(comm), error);
}

int wait_failure(ChannelClient* client, int64_t deadline_ns, HostError* error) {
  return told(client->wait_failure(deadline_ns), error);
}

void nudge(ChannelClient* client) {
  client->nudge();
}

uint64_t bytes_of(uint8_t codec, uint16_t density, uint64_t count) {
  return encoded_bytes({static_cast<Codec>(codec), density}, count);
}

StagePool* make_stages(ChannelClient* client, uint64_t largest, uint64_t most) {
  return new StagePool(client, {largest, most});
}

void free_stages(StagePool* pool) {
  delete pool;
}

Transfer* make_transfer(ChannelClient* client, StagePool* pool, const TransferRequest* request) {
  return new Transfer(client, pool, *request);
}

int told_by(const Transfer* transfer, const Status& status, HostError* error) {
  const int code = told(status, error);
  return code == kHostFailed && transfer->crowded() ? static_cast<int>(kHostBusy) : code;
}

int run_transfer(Transfer* transfer, int64_t deadline_ns, bool (*interrupted)(void*), void* context, HostError* error) {
  return told_by(transfer, transfer->run(deadline_ns, interrupt_of(interrupted, context)), error);
}

int start_transfer(Transfer* transfer, HostError* error) {
  return told_by(transfer, transfer->start(), error);
}

int step_transfer(Transfer* transfer, int64_t deadline_ns, bool (*interrupted)(void*), void* context,
                  HostError* error) {
  return told_by(transfer, transfer->step(deadline_ns, interrupt_of(interrupted, context)), error);
}

TransferState state_of_transfer(const Transfer* transfer) {
  return {transfer->submitted(), transfer->over(), transfer->source()};
}

void free_transfer(Transfer* transfer) {
  delete transfer;
}

void reduce_into(uint8_t dtype, uint8_t op, const void* const* src, int ranks, void* dst, size_t count) {
  reduce(static_cast<DType>(dtype), static_cast<ReduceOp>(op), src, ranks, &dst, 1, count, ranks, false);
}

size_t dtype_bytes(uint8_t dtype) {
  return dtype_size(static_cast<DType>(dtype));
}

}  // namespace

HostApi host_api(ChannelClient* client) {
  return {kHostApiVersion, client,         &submit,       &wait,           &alloc,         &free_segment,
          &create_comm,    &destroy_comm,  &wait_failure, &nudge,          &bytes_of,      &make_stages,
          &free_stages,    &make_transfer, &run_transfer, &start_transfer, &step_transfer, &state_of_transfer,
          &free_transfer,  &reduce_into,   &dtype_bytes};
}

}  // namespace bagua

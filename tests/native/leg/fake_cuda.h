// A CUDA runtime on host memory: every stream is a thread with a queue. It counts misuse, so that tests can be strict.
// Functions that the fakes of NCCL and of the kernels call; those for tests are in fake_cuda_control.cpp.
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

extern "C" {
// Enqueues work: how the other fakes run in stream order.
void fake_cuda_enqueue(void* stream, void (*work)(void*), void* context);
// This thread's device and its bus id. The fake NCCL asks so, not by CUDA's names: a torch that was built for CUDA has
// put the real runtime's into the process, and those would win.
void fake_cuda_here(int* device, char* bus_id, int length);
// Waits until a stream is idle; not counted as synchronisation.
void fake_cuda_drain(void* stream);
void fake_cuda_note_misuse(const char* what);
}

#endif

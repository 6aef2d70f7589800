/* An NCCL between processes over Unix sockets, on the streams of the fake CUDA runtime. It counts misuse. What tests
 * may call besides NCCL's functions: */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Communicators that were neither destroyed nor aborted. */
uint64_t fake_nccl_communicators(void);
uint64_t fake_nccl_operations(void);
/* Of them those of communicators that block. */
uint64_t fake_nccl_blocking(void);
uint64_t fake_nccl_misuses(void);
const char* fake_nccl_first_misuse(void);
/* From now on operations stand still on their streams until their communicator is aborted. */
void fake_nccl_hang(int on);

#ifdef __cplusplus
}
#endif
#endif

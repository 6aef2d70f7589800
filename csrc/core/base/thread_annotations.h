// Clang's thread-safety attributes: which mutex guards which member, checked at compile time.
//
// Other compilers ignore them. base/mutex.h defines annotated mutexes; tests/native/test_thread_safety.py runs the
// check (-Wthread-safety).
#pragma once

#if defined(__clang__)
#define BAGUA_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define BAGUA_THREAD_ATTRIBUTE(x)
#endif

// On a class. CAPABILITY: its objects are mutexes. SCOPED_CAPABILITY: its objects lock a mutex while in scope.
#define CAPABILITY(name) BAGUA_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY BAGUA_THREAD_ATTRIBUTE(scoped_lockable)

// On a member: the mutex must be locked to read or write it.
#define GUARDED_BY(mutex) BAGUA_THREAD_ATTRIBUTE(guarded_by(mutex))

// On a function: the caller must have locked the mutex.
#define REQUIRES(...) BAGUA_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))

// On a function of a mutex or lock. ACQUIRE: it locks. RELEASE: it unlocks. TRY_ACQUIRE: it locks if it returns
// `result`.
#define ACQUIRE(...) BAGUA_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) BAGUA_THREAD_ATTRIBUTE(acquire_shared_capability(__VA_ARGS__))
#define RELEASE(...) BAGUA_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define RELEASE_GENERIC(...) BAGUA_THREAD_ATTRIBUTE(release_generic_capability(__VA_ARGS__))
#define TRY_ACQUIRE(result) BAGUA_THREAD_ATTRIBUTE(try_acquire_capability(result))

// On a function that the check can't follow. Say why beside it.
#define NO_THREAD_SAFETY_ANALYSIS BAGUA_THREAD_ATTRIBUTE(no_thread_safety_analysis)

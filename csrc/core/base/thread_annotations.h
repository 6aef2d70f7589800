// Clang's thread-safety attributes: which mutex guards which member, checked at compile time.
//
// Other compilers ignore them. base/mutex.h has the mutexes that they refer to; tests/native/test_thread_safety.py runs
// the check (clang++ -Wthread-safety).
#pragma once

#if defined(__clang__)
#define BAGUA_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define BAGUA_THREAD_ATTRIBUTE(x)
#endif

// On a class: its objects are mutexes; its objects lock one while they are in scope.
#define CAPABILITY(name) BAGUA_THREAD_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY BAGUA_THREAD_ATTRIBUTE(scoped_lockable)

// On a member: it is read and written with the mutex locked; what it points to is.
#define GUARDED_BY(mutex) BAGUA_THREAD_ATTRIBUTE(guarded_by(mutex))
#define PT_GUARDED_BY(mutex) BAGUA_THREAD_ATTRIBUTE(pt_guarded_by(mutex))

// On a function: the caller has locked the mutex; has not locked it, because the function does.
#define REQUIRES(...) BAGUA_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define REQUIRES_SHARED(...) BAGUA_THREAD_ATTRIBUTE(requires_shared_capability(__VA_ARGS__))
#define EXCLUDES(...) BAGUA_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))

// On a function of a mutex or a lock: it locks; it unlocks; it locks if it returns `result`.
#define ACQUIRE(...) BAGUA_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define ACQUIRE_SHARED(...) BAGUA_THREAD_ATTRIBUTE(acquire_shared_capability(__VA_ARGS__))
#define RELEASE(...) BAGUA_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define RELEASE_GENERIC(...) BAGUA_THREAD_ATTRIBUTE(release_generic_capability(__VA_ARGS__))
#define TRY_ACQUIRE(result) BAGUA_THREAD_ATTRIBUTE(try_acquire_capability(result))

// On a function: the check can't follow it. Say why beside it.
#define NO_THREAD_SAFETY_ANALYSIS BAGUA_THREAD_ATTRIBUTE(no_thread_safety_analysis)

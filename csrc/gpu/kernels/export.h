// The library is compiled with hidden symbols; these are seen.
#pragma once

#define BAGUA_EXPORT extern "C" __attribute__((visibility("default")))

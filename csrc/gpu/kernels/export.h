// Marks the functions that the library exports; all other symbols are hidden.
#pragma once

#define BAGUA_EXPORT extern "C" __attribute__((visibility("default")))

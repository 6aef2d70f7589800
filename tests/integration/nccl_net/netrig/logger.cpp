// NCCL's logger takes a format and what belongs to it, which ctypes can't receive: this keeps the finished lines.
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

namespace {
std::mutex g_lock;
std::string g_lines;
}  // namespace

extern "C" void keep_line(int level, unsigned long, const char* file, int line, const char* format, ...)
    __attribute__((format(printf, 5, 6)));

extern "C" void keep_line(int level, unsigned long, const char*, int, const char* format, ...) {
  char text[4096];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  const std::lock_guard<std::mutex> lock(g_lock);
  if (g_lines.size() < (1 << 20)) g_lines += std::to_string(level) + " " + text + "\n";
}

// Moves what was kept, as "LEVEL TEXT" lines, to `out`. Returns its length; 0 if `capacity` is too small.
extern "C" size_t take_lines(char* out, size_t capacity) {
  const std::lock_guard<std::mutex> lock(g_lock);
  const size_t length = g_lines.size();
  if (length > capacity) return 0;
  std::memcpy(out, g_lines.data(), length);
  g_lines.clear();
  return length;
}

// Signals that Python handles, for waits of its main thread.
#pragma once

namespace bagua::dist {

// Whether a signal's handler has raised an exception in this thread. Called without the interpreter lock.
bool signalled();
// Throws that exception.
[[noreturn]] void raise_signal();

}  // namespace bagua::dist

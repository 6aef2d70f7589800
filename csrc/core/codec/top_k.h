// kTopK: keeps the largest magnitudes of each block of 16384 elements.
#pragma once

#include "codec/codec.h"

namespace bagua::codec {

void transcode_top_k(const Transcode& work);

}  // namespace bagua::codec

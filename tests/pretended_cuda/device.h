// What the two halves of the pretended CUDA device share; see __init__.py.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <cstdint>

namespace pretended {

c10::Allocator& memory();
int64_t memory_in_use();
int64_t memory_peak();
void forget_peak();

// Draws of the device: another stream of numbers than the CPU's, of which `host_draws` is the
// generator that computes them.
const at::Generator& default_draws();
at::Generator host_draws(const at::Generator& draws);

}  // namespace pretended

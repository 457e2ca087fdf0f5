// What lies between the matrix products of a Llama-shaped model in training, in bfloat16, and its
// optimizer, for CPUs with AVX512-BF16. cpu_kernels.py compiles this file and says what each function
// takes.

#include "adamw.h"
#include "attention.h"
#include "elementwise.h"
#include "head.h"

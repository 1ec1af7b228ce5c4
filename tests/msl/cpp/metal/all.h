// The part of metal_stdlib that the emulation knows. No header of the C++ library is included, on purpose: a
// kernel that uses std:: must not compile.
#pragma once
#include "types.h"
#include "traits.h"
#include "bfloat.h"
#include "limits.h"
#include "vectors.h"
#include "math.h"
#include "simdgroup.h"
#include "matrix.h"
#include "atomics.h"
#include "glue.h"

// Address spaces are one space here. The clang pass (../clang) looks at them.
#define device
#define constant
#define threadgroup
#define thread
#define kernel

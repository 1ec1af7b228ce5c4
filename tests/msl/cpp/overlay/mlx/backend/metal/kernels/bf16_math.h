// In place of MLX's header of this name: metal/math.h and metal/simdgroup.h have the overloads for bfloat.
#pragma once

// Rows of numbers and of quantised numbers, read as float32, eight neighbours at a time.

template <typename Numbers>
struct PlainRows {
  Numbers numbers;  // [., width]
  size_t width;

  inline void read(thread float* values, size_t row, size_t column) const {
    const size_t place = row * width + column;
    for (int i = 0; i < 8; i++) {
      values[i] = float(numbers[place + size_t(i)]);
    }
  }
};

// MLX's affine packing: the lowest bits of a word are its first number, GROUP neighbours share scale and bias.
template <int BITS, int GROUP, typename Words, typename Scales>
struct WeightRows {
  Words words;  // [., width * BITS / 32]
  Scales scales;  // [., width / GROUP]
  Scales biases;
  size_t width;

  inline void read(thread float* values, size_t row, size_t column) const {
    constexpr int IN_WORD = 32 / BITS;
    constexpr uint MASK = (1u << BITS) - 1u;
    const size_t group = row * (width / size_t(GROUP)) + column / size_t(GROUP);
    const float scale = float(scales[group]);
    const float bias = float(biases[group]);
    const size_t place = row * (width / size_t(IN_WORD)) + column / size_t(IN_WORD);
    for (int i = 0; i < 8; i += IN_WORD) {
      const uint word = words[place + size_t(i / IN_WORD)];
      for (int j = 0; j < IN_WORD; j++) {
        values[i + j] = scale * float((word >> uint(BITS * j)) & MASK) + bias;
      }
    }
  }
};

// BITS 0: not quantised, and scales and biases are not read.
template <int GROUP, typename Numbers, typename Scales>
struct WeightRows<0, GROUP, Numbers, Scales> {
  Numbers numbers;
  Scales scales;
  Scales biases;
  size_t width;

  inline void read(thread float* values, size_t row, size_t column) const {
    const PlainRows<Numbers> rows = {numbers, width};
    rows.read(values, row, column);
  }
};

// A tile of `rows`: rows [first, end) and DEPTH columns from `column` on, zero behind the last of either. The width is
// a multiple of 8.
template <int ROWS, int DEPTH, int STRIDE, int THREADS, typename Rows>
inline void load_tile(threadgroup float* tile, thread const Rows& rows, int first, int end, int column, int thread_id) {
  for (int i = 8 * thread_id; i < ROWS * DEPTH; i += 8 * THREADS) {
    const int row = first + i / DEPTH;
    const int place = column + i % DEPTH;
    float eight[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (row < end && size_t(place) < rows.width) {
      rows.read(eight, size_t(row), size_t(place));
    }
    for (int j = 0; j < 8; j++) {
      tile[(i / DEPTH) * STRIDE + i % DEPTH + j] = eight[j];
    }
  }
}

// The row of the lane whose number differs in these bits.
inline SoftmaxRow shuffled(SoftmaxRow own, ushort distance) {
  SoftmaxRow other;
  other.top = metal::simd_shuffle_xor(own.top, distance);
  other.sum = metal::simd_shuffle_xor(own.sum, distance);
  other.key = metal::simd_shuffle_xor(own.key, distance);
  other.index = metal::simd_shuffle_xor(own.index, distance);
  return other;
}

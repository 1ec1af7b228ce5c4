// The running state of a row of logits that is read once: largest value, sum of exponentials, best index.

constant constexpr float LOWEST = -3.402823466e+38f;
constant constexpr uint NAN_KEY = 0xffffffffu;
constant constexpr uint NO_INDEX = 0xffffffffu;

// Unsigned numbers in the order of the floats, both zeros the same and NaN above all: their maximum finds the
// largest value and a NaN at once.
inline uint order_key(float x) {
  const uint bits = as_type<uint>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return NAN_KEY;
  }
  if ((bits & 0x7fffffffu) == 0u) {
    return 0x80000000u;
  }
  return (bits & 0x80000000u) != 0u ? ~bits : (bits | 0x80000000u);
}

struct SoftmaxRow {
  float top;   // of the values so far; finite even if all are -inf, so that no difference is inf - inf
  float sum;   // of exp(value - top)
  uint key;    // order_key of the largest value
  uint index;  // its lowest index
};

inline SoftmaxRow empty_row() {
  SoftmaxRow row;
  row.top = LOWEST;
  row.sum = 0.0f;
  row.key = 0u;
  row.index = NO_INDEX;
  return row;
}

inline SoftmaxRow merged(SoftmaxRow a, SoftmaxRow b) {
  SoftmaxRow row;
  row.top = metal::max(a.top, b.top);
  row.sum = a.sum * metal::exp(a.top - row.top) + b.sum * metal::exp(b.top - row.top);
  const bool first = a.key > b.key || (a.key == b.key && a.index < b.index);
  row.key = first ? a.key : b.key;
  row.index = first ? a.index : b.index;
  return row;
}

// Adds the first `count` of NUM values, at least one, whose indices begin at `index`, behind all before.
template <int NUM>
inline void push(thread SoftmaxRow& row, const thread float* values, int count, uint index) {
  float top = row.top;
  for (int i = 0; i < NUM; i++) {
    if (i < count) {
      top = metal::max(top, values[i]);
    }
  }
  if (top > row.top) {
    row.sum *= metal::exp(row.top - top);
    row.top = top;
  }
  float sum = 0.0f;  // of these few first: a long row is summed in two levels
  for (int i = 0; i < NUM; i++) {
    if (i < count) {
      sum += metal::exp(values[i] - top);
      const uint key = order_key(values[i]);
      if (key > row.key) {
        row.key = key;
        row.index = index + uint(i);
      }
    }
  }
  row.sum += sum;
}

// The 32 rows of a SIMD group as one, in every lane.
inline SoftmaxRow merged_over_lanes(SoftmaxRow row) {
  SoftmaxRow all;
  all.top = metal::simd_max(row.top);
  all.sum = metal::simd_sum(row.sum * metal::exp(row.top - all.top));
  all.key = metal::simd_max(row.key);
  all.index = metal::simd_min(row.key == all.key ? row.index : NO_INDEX);
  return all;
}

// Logits of 32 rows for a stretch of the vocabulary, 64 tokens at a time, of which only the softmax's state is kept.
// Four SIMD groups multiply, each a corner of 16 rows and 32 tokens; then four lanes have a row, each 16 of its logits.
//
// Template: BITS of a weight, 4 or 8; 0: the weights are floats, and scales and biases are not read. GROUP, weights
// that share a scale.
// Grid: splits of the vocabulary, blocks of rows.
  constexpr int THREADS = 128;
  constexpr int ROWS = 32;
  constexpr int TOKENS = 64;
  constexpr int DEPTH = 32;
  constexpr int STRIDE = DEPTH + 4;  // 4 more against bank conflicts
  constexpr int LOGITS = TOKENS + 4;
  constexpr int OWN = TOKENS / 4;
  constexpr int SHARED = TOKENS * STRIDE > ROWS * LOGITS ? TOKENS * STRIDE : ROWS * LOGITS;
  using Matrix = metal::simdgroup_matrix<float, 8, 8>;

  const int num_rows = hidden_shape[0];
  const int width = hidden_shape[1];
  const int size = weight_shape[0];
  const int num_targets = targets_shape[1];
  const int split = int(threadgroup_position_in_grid.x);
  const int num_splits = int(threadgroups_per_grid.x);
  const int first = int(threadgroup_position_in_grid.y) * ROWS;
  const int thread_id = int(thread_position_in_threadgroup.x);
  const int simd = int(simdgroup_index_in_threadgroup);
  const int per_split = ((size + num_splits - 1) / num_splits + TOKENS - 1) / TOKENS * TOKENS;
  const int begin = metal::min(size, split * per_split);
  const int end = metal::min(size, begin + per_split);

  threadgroup float hidden_tile[ROWS * STRIDE];
  threadgroup float weight_tile[SHARED];
  threadgroup float* logits = weight_tile;  // the products take the place of their factors

  const PlainRows<decltype(hidden)> hidden_rows = {hidden, size_t(width)};
  const WeightRows<BITS, GROUP, decltype(weight), decltype(scales)> weight_rows = {weight, scales, biases, size_t(width)};
  const int corner_row = simd / 2 * 16;
  const int corner_token = simd % 2 * 32;
  const int own_row = thread_id / 4;
  const int own_token = thread_id % 4 * OWN;
  const int row = first + own_row;
  SoftmaxRow state = empty_row();

  for (int start = begin; start < end; start += TOKENS) {
    Matrix products[2][4];
    _Pragma("clang loop unroll(full)")
    for (int i = 0; i < 2; i++) {
      _Pragma("clang loop unroll(full)")
      for (int j = 0; j < 4; j++) {
        products[i][j] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    for (int column = 0; column < width; column += DEPTH) {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      load_tile<ROWS, DEPTH, STRIDE, THREADS>(hidden_tile, hidden_rows, first, num_rows, column, thread_id);
      load_tile<TOKENS, DEPTH, STRIDE, THREADS>(weight_tile, weight_rows, start, end, column, thread_id);
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      for (int k = 0; k < DEPTH; k += 8) {
        Matrix left[2];
        Matrix right[4];
        _Pragma("clang loop unroll(full)")
        for (int i = 0; i < 2; i++) {
          metal::simdgroup_load(left[i], hidden_tile + (corner_row + 8 * i) * STRIDE + k, STRIDE);
        }
        _Pragma("clang loop unroll(full)")
        for (int j = 0; j < 4; j++) {
          metal::simdgroup_load(right[j], weight_tile + (corner_token + 8 * j) * STRIDE + k, STRIDE, 0, true);
        }
        _Pragma("clang loop unroll(full)")
        for (int i = 0; i < 2; i++) {
          _Pragma("clang loop unroll(full)")
          for (int j = 0; j < 4; j++) {
            metal::simdgroup_multiply_accumulate(products[i][j], left[i], right[j], products[i][j]);
          }
        }
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    _Pragma("clang loop unroll(full)")
    for (int i = 0; i < 2; i++) {
      _Pragma("clang loop unroll(full)")
      for (int j = 0; j < 4; j++) {
        threadgroup float* corner = logits + (corner_row + 8 * i) * LOGITS + corner_token + 8 * j;
        metal::simdgroup_store(products[i][j], corner, LOGITS);
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    const int count = metal::min(OWN, end - start - own_token);
    if (row < num_rows && count > 0) {
      float values[OWN];
      for (int i = 0; i < OWN; i++) {
        values[i] = logits[own_row * LOGITS + own_token + i];
      }
      push<OWN>(state, values, count, uint(start + own_token));
    }
    // the target's logit is the very number that the sum and the argmax have seen: a product computed apart could
    // round otherwise, and a target that is the argmax would not have its log-probability
    if (row < num_rows) {
      for (int k = thread_id % 4; k < num_targets; k += 4) {
        const size_t place = size_t(row) * size_t(num_targets) + size_t(k);
        const int target = targets[place];
        if (target >= start && target < metal::min(start + TOKENS, end)) {
          chosen[place] = logits[own_row * LOGITS + target - start];
        }
      }
    }
  }

  state = merged(state, shuffled(state, ushort(1)));
  state = merged(state, shuffled(state, ushort(2)));
  if (row < num_rows && thread_id % 4 == 0) {
    const size_t place = size_t(row) * size_t(num_splits) + size_t(split);
    const bool has_nan = state.key == NAN_KEY;
    const bool is_lowest = state.key == order_key(-INFINITY);
    tops[place] = has_nan ? NAN : is_lowest ? -INFINITY : state.top;
    sums[place] = state.sum;
    indices[place] = state.index;
  }
  // every target is written by the split that has it, and those that no split has by the first
  if (row < num_rows && split == 0) {
    for (int k = thread_id % 4; k < num_targets; k += 4) {
      const size_t place = size_t(row) * size_t(num_targets) + size_t(k);
      if (targets[place] < 0 || targets[place] >= size) {
        chosen[place] = NAN;
      }
    }
  }

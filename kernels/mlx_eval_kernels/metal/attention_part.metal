// Attention of a block of queries to a stretch of keys, not yet divided by the sum of its exponentials.
// A SIMD group has 8 queries, all groups share the keys and then the values that lie in `tile`.
//
// Template: T, type of queries, keys and values. SIMDS of a group. BLOCK, keys at a time, a multiple of 8. D and E,
// widths of keys and values, multiples of 8. TOGETHER: the queries of all rows read the same keys [1, H, S, D]; else
// each row has its own. MASK: 0, all keys are seen; 1, those up to the query's own token; 2, as `mask` says.
// Grid: splits of the keys, blocks of queries, heads of keys (of all rows, if not TOGETHER).
  constexpr int THREADS = 32 * SIMDS;
  constexpr int QUERIES = 8 * SIMDS;
  constexpr int WIDTH = (D > E ? D : E) + 4;  // 4 more against bank conflicts
  constexpr int SCORES = BLOCK + 4;
  constexpr int QUARTER = BLOCK / 4;
  using Matrix = metal::simdgroup_matrix<float, 8, 8>;

  const int num_rows = queries_shape[0];  // [B, H, G, T, D]
  const int num_heads = queries_shape[1];
  const int length = queries_shape[3];
  const int row_queries = queries_shape[2] * length;
  const int num_keys = keys_shape[2];
  const int num_queries = TOGETHER ? num_rows * row_queries : row_queries;
  const int split = int(threadgroup_position_in_grid.x);
  const int num_splits = int(threadgroups_per_grid.x);
  const int first = int(threadgroup_position_in_grid.y) * QUERIES;
  const int head = int(threadgroup_position_in_grid.z);
  const int thread_id = int(thread_position_in_threadgroup.x);
  const int lane = int(thread_index_in_simdgroup);
  const int simd = int(simdgroup_index_in_threadgroup);

  threadgroup float tile[BLOCK * WIDTH];
  threadgroup float scores[QUERIES * SCORES];
  threadgroup float factors[SIMDS * 64];

  // which keys this group reads
  const int per_split = ((num_keys + num_splits - 1) / num_splits + BLOCK - 1) / BLOCK * BLOCK;
  const int begin = split * per_split;
  int end = metal::min(num_keys, begin + per_split);
  if (MASK == 1) {
    const int last = metal::min(first + QUERIES, num_queries) - 1;
    const bool wraps = first % length + (last - first) >= length;
    end = metal::min(end, num_keys - (wraps ? 0 : length - 1 - last % length));
  }

  // the queries, scaled, as matrices in registers
  Matrix query[D / 8];
  for (int base = 0; base < QUERIES; base += BLOCK) {
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = thread_id; i < BLOCK * D; i += THREADS) {
      const int row = base + i / D;
      float value = 0.0f;
      if (row < QUERIES && first + row < num_queries) {
        const size_t place = place_of<TOGETHER>(first + row, head, num_heads, row_queries);
        value = float(queries[place * size_t(D) + size_t(i % D)]) * scale;
      }
      tile[(i / D) * WIDTH + i % D] = value;
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const int own = 8 * simd - base;
    if (own >= 0 && own < BLOCK) {
      _Pragma("clang loop unroll(full)")
      for (int d = 0; d < D / 8; d++) {
        metal::simdgroup_load(query[d], tile + own * WIDTH + 8 * d, WIDTH);
      }
    }
  }

  Matrix mixed[E / 8];
  _Pragma("clang loop unroll(full)")
  for (int e = 0; e < E / 8; e++) {
    mixed[e] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  // four lanes have a row of scores, each a quarter of its columns
  const int row = lane / 4;
  const int quarter = lane % 4;
  const int number = first + 8 * simd + row;
  const int token = number % length;
  float top = LOWEST;
  float sum = 0.0f;

  for (int start = begin; start < end; start += BLOCK) {
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    load_tile<BLOCK, D, WIDTH, THREADS>(tile, keys + size_t(head) * size_t(num_keys) * size_t(D), start, end, thread_id);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    threadgroup float* own_scores = scores + 8 * simd * SCORES;
    for (int j = 0; j < BLOCK; j += 8) {
      Matrix product = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      _Pragma("clang loop unroll(full)")
      for (int d = 0; d < D / 8; d++) {
        Matrix key;
        metal::simdgroup_load(key, tile + j * WIDTH + 8 * d, WIDTH, 0, true);
        metal::simdgroup_multiply_accumulate(product, query[d], key, product);
      }
      metal::simdgroup_store(product, own_scores + j, SCORES);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    load_tile<BLOCK, E, WIDTH, THREADS>(tile, values + size_t(head) * size_t(num_keys) * size_t(E), start, end, thread_id);

    // softmax of the block, in place of its scores
    threadgroup float* quarter_scores = own_scores + row * SCORES + quarter * QUARTER;
    float weights[QUARTER];
    bool seen[QUARTER];
    float largest = top;
    for (int i = 0; i < QUARTER; i++) {
      const int key = start + quarter * QUARTER + i;
      seen[i] = key < end && number < num_queries;
      if (MASK == 1) {
        seen[i] = seen[i] && key <= num_keys - length + token;
      }
      if (MASK == 2 && seen[i]) {
        const int mask_row = mask_shape[0] == 1 ? 0 : head / num_heads;
        seen[i] = mask[(size_t(mask_row) * size_t(length) + size_t(token)) * size_t(num_keys) + size_t(key)];
      }
      weights[i] = quarter_scores[i];
      if (seen[i]) {
        largest = metal::max(largest, weights[i]);
      }
    }
    largest = metal::max(largest, metal::simd_shuffle_xor(largest, ushort(1)));
    largest = metal::max(largest, metal::simd_shuffle_xor(largest, ushort(2)));
    float block_sum = 0.0f;
    for (int i = 0; i < QUARTER; i++) {
      weights[i] = seen[i] ? metal::exp(weights[i] - largest) : 0.0f;
      quarter_scores[i] = weights[i];
      block_sum += weights[i];
    }
    block_sum += metal::simd_shuffle_xor(block_sum, ushort(1));
    block_sum += metal::simd_shuffle_xor(block_sum, ushort(2));
    const float factor = metal::exp(top - largest);
    sum = sum * factor + block_sum;
    top = largest;
    factors[simd * 64 + row * 8 + quarter * 2] = factor;
    factors[simd * 64 + row * 8 + quarter * 2 + 1] = factor;
    const bool grew = metal::simd_any(factor != 1.0f);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    if (grew) {
      Matrix by_row;  // each row full of its own factor: multiplied element by element, a NaN stays in its row
      metal::simdgroup_load(by_row, factors + simd * 64, 8);
      _Pragma("clang loop unroll(full)")
      for (int e = 0; e < E / 8; e++) {
        mixed[e].thread_elements()[0] *= by_row.thread_elements()[0];
        mixed[e].thread_elements()[1] *= by_row.thread_elements()[1];
      }
    }
    for (int j = 0; j < BLOCK; j += 8) {
      Matrix weight;
      metal::simdgroup_load(weight, own_scores + j, SCORES);
      _Pragma("clang loop unroll(full)")
      for (int e = 0; e < E / 8; e++) {
        Matrix value;
        metal::simdgroup_load(value, tile + j * WIDTH + 8 * e, WIDTH);
        metal::simdgroup_multiply_accumulate(mixed[e], weight, value, mixed[e]);
      }
    }
  }

  const size_t part = size_t(split) * size_t(num_rows) * size_t(num_heads) * size_t(row_queries);
  if (quarter == 0 && number < num_queries) {
    const size_t place = part + place_of<TOGETHER>(number, head, num_heads, row_queries);
    tops[place] = top;
    sums[place] = sum;
  }
  for (int base = 0; base < QUERIES; base += BLOCK) {
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const int own = 8 * simd - base;
    if (own >= 0 && own < BLOCK) {
      _Pragma("clang loop unroll(full)")
      for (int e = 0; e < E / 8; e++) {
        metal::simdgroup_store(mixed[e], tile + own * WIDTH + 8 * e, WIDTH);
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = thread_id; i < BLOCK * E; i += THREADS) {
      const int from = base + i / E;
      if (from < QUERIES && first + from < num_queries) {
        const size_t place = part + place_of<TOGETHER>(first + from, head, num_heads, row_queries);
        mixture[place * size_t(E) + size_t(i % E)] = tile[(i / E) * WIDTH + i % E];
      }
    }
  }

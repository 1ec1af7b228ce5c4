// One group of THREADS threads a row. Template: T, type of the logits; THREADS, a multiple of 32 up to 1,024.
  constexpr int CHUNK = 4;
  constexpr uint SIMDS = THREADS / 32;
  const uint row = threadgroup_position_in_grid.x;
  const uint thread_id = thread_position_in_threadgroup.x;
  const uint lane = thread_index_in_simdgroup;
  const uint simd = simdgroup_index_in_threadgroup;
  const int size = logits_shape[1];
  const int num_targets = targets_shape[1];
  auto values = logits + size_t(row) * size_t(size);

  threadgroup float tops[SIMDS];
  threadgroup float sums[SIMDS];
  threadgroup uint keys[SIMDS];
  threadgroup uint indices[SIMDS];

  SoftmaxRow state = empty_row();
  for (int begin = int(thread_id) * CHUNK; begin < size; begin += THREADS * CHUNK) {
    const int count = metal::min(CHUNK, size - begin);
    float chunk[CHUNK];
    for (int i = 0; i < CHUNK; i++) {
      chunk[i] = i < count ? float(values[begin + i]) : 0.0f;
    }
    push<CHUNK>(state, chunk, count, uint(begin));
  }
  state = merged_over_lanes(state);
  if (lane == 0) {
    tops[simd] = state.top;
    sums[simd] = state.sum;
    keys[simd] = state.key;
    indices[simd] = state.index;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  // every SIMD group merges for itself, so that all threads can score targets
  state = empty_row();
  if (lane < SIMDS) {
    state.top = tops[lane];
    state.sum = sums[lane];
    state.key = keys[lane];
    state.index = indices[lane];
  }
  state = merged_over_lanes(state);
  const bool has_nan = state.key == NAN_KEY;
  const bool infinite = metal::isinf(state.top);
  // a row of -inf has the sum 0 and the logarithm -inf; the sum of a row with inf is NaN and is not read
  const float log_sum = infinite ? 0.0f : metal::log(state.sum);
  for (int k = int(thread_id); k < num_targets; k += THREADS) {
    const size_t place = size_t(row) * size_t(num_targets) + size_t(k);
    const int target = targets[place];
    const bool known = !has_nan && target >= 0 && target < size;
    // not value - logsumexp: where logits are large, that sum has lost digits
    logprob[place] = known ? (float(values[target]) - state.top) - log_sum : NAN;
  }
  if (thread_id == 0) {
    logsumexp[row] = has_nan ? NAN : state.top + log_sum;
    argmax[row] = state.index;
    argmax_logprob[row] = has_nan ? NAN : (float(values[state.index]) - state.top) - log_sum;
  }

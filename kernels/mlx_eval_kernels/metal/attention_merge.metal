// One attention of several parts, each weighted by the exponential of its own largest score.
// One thread a number. Template: T, type of the result. E, width of the values. SINKS: whether `sinks` count.
  const size_t number = size_t(thread_position_in_grid.x);
  const size_t query = number / size_t(E);
  const int num_far = far_tops_shape[0];                           // [X, B, H, G, T]
  const size_t num_heads = size_t(near_tops_shape[2]) * size_t(near_tops_shape[3]);  // [1, B, H, G, T]
  const size_t length = size_t(near_tops_shape[4]);
  const size_t num_queries = size_t(near_tops_shape[1]) * num_heads * length;

  float top = near_tops[query];
  for (int part = 0; part < num_far; part++) {
    top = metal::max(top, far_tops[size_t(part) * num_queries + query]);
  }
  float sink = 0.0f;
  if (SINKS) {
    sink = float(sinks[query / length % num_heads]);
    top = metal::max(top, sink);
  }
  const float near_weight = metal::exp(near_tops[query] - top);
  float sum = near_weight * near_sums[query];
  float value = near_weight * near_mixture[number];
  for (int part = 0; part < num_far; part++) {
    const size_t place = size_t(part) * num_queries + query;
    const float weight = metal::exp(far_tops[place] - top);
    sum += weight * far_sums[place];
    value += weight * far_mixture[size_t(part) * num_queries * size_t(E) + number];
  }
  if (SINKS) {
    sum += metal::exp(sink - top);
  }
  mixed[number] = T(value / sum);

// What the blocks of attention read and where.

constant constexpr float LOWEST = -3.402823466e+38f;

// The place of a query among [B, H, G * T]: of all rows that share a head of keys, or of one row's head.
template <bool TOGETHER>
inline size_t place_of(int query, int head, int num_heads, int row_queries) {
  if (TOGETHER) {
    const size_t row = size_t(query / row_queries);
    return (row * size_t(num_heads) + size_t(head)) * size_t(row_queries) + size_t(query % row_queries);
  }
  return size_t(head) * size_t(row_queries) + size_t(query);
}

// Rows [first, end) of an array [., COLUMNS] as float32, zero behind the end.
template <int ROWS, int COLUMNS, int WIDTH, int THREADS, typename Pointer>
inline void load_tile(threadgroup float* tile, Pointer source, int first, int end, int thread_id) {
  for (int i = thread_id; i < ROWS * COLUMNS; i += THREADS) {
    const int row = i / COLUMNS;
    const int column = i % COLUMNS;
    float value = 0.0f;
    if (first + row < end) {
      value = float(source[size_t(first + row) * size_t(COLUMNS) + size_t(column)]);
    }
    tile[row * WIDTH + column] = value;
  }
}

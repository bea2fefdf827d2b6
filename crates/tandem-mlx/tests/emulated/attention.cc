// attention ROWS HEADS KV_HEADS TURNED SPLITS WINDOW: attention.cu against f64, for sequences of several lengths. Nothing but
// the new tokens' keys and values may change, and the counters must be zeros again.
int main(int, char** arguments) {
  const int rows = atoi(arguments[1]), heads = atoi(arguments[2]), kv_heads = atoi(arguments[3]);
  const int turned = atoi(arguments[4]), splits = atoi(arguments[5]), window = atoi(arguments[6]);
  constexpr int lengths[8] = {40, 1, 300, 5, 64, 65, 33, 200}, capacity = 320;
  const int width = (heads + 2 * kv_heads) * DIM;
  const auto qkv = drawn((size_t)rows * width, 2);
  std::vector<float> wavelengths(turned / 2);
  for (int i = 0; i < turned / 2; ++i) {
    wavelengths[i] = pow(10000.0, 2.0 * i / turned);
  }
  std::vector<u32> counters(rows * heads / HEADS, 0);
  std::vector<float> parts((size_t)rows * heads * splits * (DIM + 2), NAN);
  std::vector<u16> out((size_t)rows * heads * DIM, 0x7fc0), keys[8], values[8];
  int first[8], position[8];
  for (int row = 0; row < rows; ++row) {
    keys[row] = drawn((size_t)kv_heads * capacity * DIM), values[row] = drawn((size_t)kv_heads * capacity * DIM);
    position[row] = lengths[row] - 1;
    first[row] = window ? std::max(0, position[row] + 1 - window) : 0;
  }
  const std::vector<u16> old_keys[8] = {keys[0], keys[1], keys[2], keys[3], keys[4], keys[5], keys[6], keys[7]};
  const std::vector<u16> old_values[8] = {values[0], values[1], values[2], values[3],
                                          values[4], values[5], values[6], values[7]};
  const float scale = 1 / sqrtf(DIM);
#define BUFFERS(i) keys[i].data(), values[i].data()
#define WHERE(i) first[i], position[i], capacity
  launch({splits, heads / HEADS, rows}, WARPS * 32, [&] {
    tandem_attention(qkv.data(), wavelengths.data(), counters.data(), ALL(BUFFERS), out.data(), parts.data(), ALL(WHERE),
                     heads, kv_heads, turned, scale);
  });

  Error attended, written;
  bool kept = std::all_of(counters.begin(), counters.end(), [](u32 counter) { return counter == 0; });
  for (int row = 0; row < rows; ++row) {
    const u16* own = &qkv[(size_t)row * width];
    const auto turn = [&](int head, int i) {
      const u16* x = own + head * DIM;
      if (i >= turned) {
        return (double)widen(x[i]);
      }
      const int half = turned / 2, pair = i % half;
      const double angle = position[row] / (double)wavelengths[pair], a = widen(x[pair]), b = widen(x[pair + half]);
      return i < half ? a * cos(angle) - b * sin(angle) : a * sin(angle) + b * cos(angle);
    };
    for (int head = 0; head < kv_heads; ++head) {
      for (int key = 0; key < capacity; ++key) {
        for (int i = 0; i < DIM; ++i) {
          const size_t at = ((size_t)head * capacity + key) * DIM + i;
          if (key == position[row]) {
            written.add(widen(keys[row][at]), turn(heads + head, i));
            written.add(widen(values[row][at]), widen(own[(heads + kv_heads + head) * DIM + i]));
          } else {
            kept &= keys[row][at] == old_keys[row][at] && values[row][at] == old_values[row][at];
          }
        }
      }
    }
    for (int head = 0; head < heads; ++head) {
      const size_t start = (size_t)(head / (heads / kv_heads)) * capacity * DIM;
      std::vector<double> weights;
      double sum = 0;
      for (int key = first[row]; key <= position[row]; ++key) {
        double score = 0;
        for (int i = 0; i < DIM; ++i) {
          score += turn(head, i) * widen(keys[row][start + key * DIM + i]);
        }
        weights.push_back(exp(score * scale));
        sum += weights.back();
      }
      for (int i = 0; i < DIM; ++i) {
        double expected = 0;
        for (size_t key = 0; key < weights.size(); ++key) {
          expected += weights[key] / sum * widen(values[row][start + (first[row] + key) * DIM + i]);
        }
        attended.add(widen(out[((size_t)row * heads + head) * DIM + i]), expected);
      }
    }
  }
  printf("nothing else was written: %d\n", kept);
  return !(attended.small("attention") && written.small("keys and values") && kept);
}

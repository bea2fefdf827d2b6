// choose ROWS VOCAB BLOCKS: choose.cu against a loop, over few distinct values, with a NaN in the last row of several.
int main(int, char** arguments) {
  const int rows = atoi(arguments[1]), vocab = atoi(arguments[2]), blocks = atoi(arguments[3]);
  std::vector<u16> logits((size_t)rows * vocab);
  for (auto& logit : logits) {
    logit = narrow(floorf(drawn() * 100));
  }
  if (rows > 1) {
    logits[(size_t)rows * vocab - 7] = 0xffc1;
  }
  std::vector<u64> best(8, 0);
  std::vector<u32> counters(8, 0), ids(rows, ~0u);
  u32 told[8][2];
#define TOLD(i) told[i]
  launch({blocks, rows, 1}, THREADS, [&] {
    tandem_choose((const uint4*)logits.data(), best.data(), counters.data(), ids.data(), ALL(TOLD), vocab);
  });
  bool right = true;
  for (int row = 0; row < rows; ++row) {
    int most = 0;
    for (int i = 1; i < vocab; ++i) {
      const float a = widen(logits[(size_t)row * vocab + most]), b = widen(logits[(size_t)row * vocab + i]);
      most = !std::isnan(a) && (b > a || std::isnan(b)) ? i : most;
    }
    const float expected = widen(logits[(size_t)row * vocab + most]), got = __uint_as_float(told[row][1]);
    right &= ids[row] == (u32)most && told[row][0] == (u32)most && best[row] == 0 && counters[row] == 0;
    right &= got == expected || (std::isnan(got) && std::isnan(expected));
  }
  printf("chosen as a loop does: %d\n", right);
  return !right;
}

// product ROWS COLS WIDTH BLOCKS: product.cu against f64.
int main(int, char** arguments) {
  const int rows = atoi(arguments[1]), cols = atoi(arguments[2]), width = atoi(arguments[3]), blocks = atoi(arguments[4]);
  const size_t height = (size_t)width * MATRICES;
  const auto x = drawn((size_t)rows * cols), gain = drawn(cols, 0.3, 1), residual = drawn((size_t)rows * width);
  std::vector<u16> y((size_t)rows * width, 0x7fc0);
  std::vector<float> weights(height * cols);
#if AFFINE
  std::vector<u32> values(height * cols / 8);
  for (auto& eight : values) {
    eight = (u32)(drawn() * 32768 + 32768) << 16 | (u32)(drawn() * 32768 + 32768);
  }
  const auto scales = drawn(height * cols / 64, 0.005, 0.01), biases = drawn(height * cols / 64, 0.02, -0.07);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = (values[i / 8] >> 4 * (i % 8) & 15) * widen(scales[i / 64]) + widen(biases[i / 64]);
  }
#else
  const auto values = drawn(height * cols, 0.05);
  std::transform(values.begin(), values.end(), weights.begin(), widen);
#endif
  const float eps = 1e-5;
  launch({blocks, 1, 1}, WARPS * 32, [&] {
    tandem_product(
        x.data(),
#if NORM
        gain.data(),
#endif
        (const char*)values.data(),
#if AFFINE
        scales.data(), biases.data(),
#endif
#if AFTER == 1
        residual.data(),
#endif
        y.data(), rows, cols, width, eps);
  });
  Error error;
  for (int row = 0; row < rows; ++row) {
    std::vector<double> input(cols);
    double squares = 0;
    for (int k = 0; k < cols; ++k) {
      input[k] = widen(x[row * cols + k]);
      squares += input[k] * input[k];
    }
    for (int k = 0; NORM && k < cols; ++k) {
      input[k] *= widen(gain[k]) / sqrt(squares / cols + eps);
    }
    for (int n = 0; n < width; ++n) {
      double sums[2] = {0, 0};
      for (int m = 0; m < MATRICES; ++m) {
        for (int k = 0; k < cols; ++k) {
          sums[m] += input[k] * weights[(size_t)(m * width + n) * cols + k];
        }
      }
      const double z = sums[0];
      const double gelu = 0.5 * z * (1 + tanh(sqrt(2 / M_PI) * (z + 0.044715 * z * z * z)));
      const double expected[4] = {z, z + widen(residual[row * width + n]), z / (1 + exp(-z)) * sums[1], gelu * sums[1]};
      error.add(widen(y[row * width + n]), expected[AFTER]);
    }
  }
  return !error.small("product");
}

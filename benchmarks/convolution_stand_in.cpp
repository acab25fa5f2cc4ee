// Convolutions that make their outputs and nothing else. They replace PyTorch's on the CPU, below
// the dispatcher, autograd and autocast, whose work is that of real convolutions.
#include <ATen/ATen.h>
#include <ATen/native/ConvUtils.h>
#include <torch/library.h>

using at::Tensor;
using Ints = c10::SymIntArrayRef;

Tensor forward(const Tensor& x, const Tensor& weight, const std::optional<Tensor>&, Ints stride,
               Ints padding, Ints dilation, bool, Ints, c10::SymInt) {
  auto size = at::native::conv_output_size(
      x.sizes(), weight.sizes(), C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(stride),
      C10_AS_INTARRAYREF_SLOW(dilation));
  return at::empty(size, x.options(), x.suggest_memory_format());
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor&, const Tensor& x, const Tensor& weight,
                                            c10::OptionalArrayRef<c10::SymInt>, Ints, Ints, Ints,
                                            bool, Ints, c10::SymInt, std::array<bool, 3> wanted) {
  return {wanted[0] ? at::empty_like(x) : Tensor(), wanted[1] ? at::empty_like(weight) : Tensor(),
          wanted[2] ? at::empty({weight.size(0)}, weight.options()) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CPU, library) {
  library.impl("convolution", forward);
  library.impl("convolution_backward", backward);
}

// The device's operations. Each is the CPU's, run on the device's memory; what a device refuses is
// refused: tensors of two places in one operation, and in the capture of a graph whatever the host
// would have to wait for. A graph is the list of the operations captured; replaying runs them again
// on the same addresses, and nothing of what Python did between them.

#include "device.h"

#include <torch/extension.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <set>

namespace pretended {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Sizes = at::IntArrayRef;

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

struct Captured {
  c10::OperatorHandle op;
  std::vector<IValue> arguments, results;
};
using Graph = std::vector<Captured>;
std::map<int64_t, Graph> graphs;
Graph* capturing = nullptr;

// A kernel answers to the host, which no capture allows.
const std::set<std::string> kHostWaits = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::is_nonzero", "aten::_unique2", "aten::bincount", "aten::repeat_interleave.Tensor"};
// Indices of the host are taken along by CUDA too.
const std::set<std::string> kTakesHostIndices = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor",
    "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::pin_memory"};

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

at::Tensor over(c10::Storage storage, const at::Tensor& like, c10::DispatchKeySet keys) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The same memory as a tensor of the CPU.
at::Tensor face(const at::Tensor& tensor) {
  auto* start = tensor.storage().mutable_data();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(start, c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  auto found = over(std::move(storage), tensor, c10::DispatchKeySet(c10::DispatchKey::CPU));
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    found.unsafeGetTensorImpl()->set_wrapped_number(true);
  return found;
}

at::Tensor new_tensor(Sizes size, Sizes stride, c10::ScalarType type) {
  return at::detail::empty_strided_generic(size, stride, &memory(), kKeys, type);
}

at::Tensor taken_over(const at::Tensor& host) {
  auto tensor = new_tensor(host.sizes(), host.strides(), host.scalar_type());
  face(tensor).copy_(host);
  return tensor;
}

std::string name_of(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// One call of an operation: its tensors lent to the CPU, and what comes back.
struct Call {
  struct Lent {
    at::Tensor tensor, host;
  };
  std::vector<Lent> lent;
  bool host_tensors = false;

  at::Tensor lend(const at::Tensor& tensor) {
    if (!on_device(tensor)) {
      host_tensors = host_tensors || (tensor.defined() && tensor.dim() > 0);
      return tensor;
    }
    lent.push_back({tensor, face(tensor)});
    return lent.back().host;
  }

  IValue lend(const IValue& value, const std::string& type) {
    if (value.isTensor()) return lend(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const auto& tensor : value.toTensorVector()) all.push_back(lend(tensor));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (std::optional<at::Tensor> one : value.toOptionalTensorList())
        all.push_back(one ? std::optional<at::Tensor>(lend(*one)) : one);
      return all;
    }
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isGenerator()) return host_draws(value.toGenerator());
    if (value.isNone() && type == "Generator?") return host_draws(default_draws());
    return value;
  }

  // A tensor that the operation made larger has another memory now.
  void settle() {
    for (auto& [tensor, host] : lent) {
      auto* impl = tensor.unsafeGetTensorImpl();
      if (host.storage().data() != tensor.storage().data()) {
        TORCH_CHECK(!capturing, "memory of a graph can't be resized");
        const auto bytes = static_cast<int64_t>(host.storage().nbytes());
        auto moved = new_tensor({bytes}, {1}, at::kByte);
        std::memcpy(moved.mutable_data_ptr(), host.storage().data(), bytes);
        impl->set_storage_keep_dtype(moved.storage());
      }
      if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  at::Tensor back(const at::Tensor& found) {
    if (!found.defined()) return found;
    for (auto& [tensor, host] : lent)
      if (host.is_same(found)) return tensor;
    for (auto& [tensor, host] : lent)  // a view of what was given
      if (found.storage().data() && found.storage().data() == host.storage().data())
        return over(c10::Storage(tensor.storage()), found, kKeys);
    return taken_over(found);
  }

  IValue back(const IValue& value) {
    if (value.isTensor()) return back(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> all;
    for (const auto& tensor : value.toTensorVector()) all.push_back(back(tensor));
    return all;
  }
};

// What `UntypedStorage.resize_` does: other memory under the tensors that share the storage.
void resize_storage(const at::Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto moved = memory().allocate(bytes);
  std::memcpy(moved.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(moved));
  storage->set_nbytes(bytes);
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = name_of(op);
  const auto first = stack->size() - schema.arguments().size();
  const std::vector<IValue> arguments(stack->begin() + first, stack->end());
  Call call;
  for (size_t i = 0; i < arguments.size(); i++)
    (*stack)[first + i] = call.lend(arguments[i], schema.arguments()[i].type()->annotation_str());
  const bool mixed = !call.lent.empty() && call.host_tensors;
  TORCH_CHECK(
      !mixed || (kTakesHostIndices.count(name) && !capturing),
      "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
      "cpu! (", name, ")");
  TORCH_CHECK(
      !capturing || !kHostWaits.count(name),
      "operation not permitted when stream is capturing: ", name);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  const auto results = stack->end() - static_cast<int64_t>(schema.returns().size());
  for (auto each = results; each != stack->end(); ++each) *each = call.back(*each);
  if (capturing) capturing->push_back({op, arguments, {results, stack->end()}});
}

at::Tensor empty(
    Sizes size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    Sizes size, Sizes stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return new_tensor(size, stride, c10::dtype_or_default(type));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  auto host = [](const at::Tensor& tensor) { return on_device(tensor) ? face(tensor) : tensor; };
  host(self).copy_(host(from));
  if (capturing) {
    TORCH_CHECK(
        on_device(self) && on_device(from),
        "Cannot copy between CPU and CUDA tensors during CUDA graph capture");
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    capturing->push_back({op, {self, from, non_blocking}, {self}});
  }
  return self;
}

at::Tensor as_strided(
    const at::Tensor& self, Sizes size, Sizes stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

// What a replayed operation computed goes where the captured one had put it.
void put(const IValue& into, const IValue& found) {
  if (into.isTensorList()) {
    const auto places = into.toTensorVector(), values = found.toTensorVector();
    for (size_t i = 0; i < places.size(); i++) put(places[i], values[i]);
  } else if (into.isTensor() && into.toTensor().defined()) {
    const auto place = into.toTensor(), value = found.toTensor();
    if (place.data_ptr() == value.data_ptr()) return;
    TORCH_CHECK(place.sizes() == value.sizes(), "a graph's shapes can't depend on data");
    face(place).copy_(face(value));
  }
}

void replay(int64_t key) {
  for (const auto& [op, arguments, results] : graphs.at(key)) {
    Stack stack(arguments.begin(), arguments.end());
    op.callBoxed(&stack);
    for (size_t i = 0; i < results.size(); i++) put(results[i], stack[i]);
  }
}

int64_t start_capture() {
  TORCH_CHECK(!capturing, "a capture is under way");
  static int64_t made = 0;
  capturing = &graphs[++made];
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl(
      "set_.source_Storage",
      static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("record_stream", +[](at::Tensor&, at::Stream) {});
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  c10::SetAllocator(c10::kCUDA, &memory(), 1);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&plain_attention);
  module.def("memory_in_use", &memory_in_use);
  module.def("memory_peak", &memory_peak);
  module.def("forget_peak", &forget_peak);
  module.def("resize_storage", &resize_storage);
  module.def("default_draws", &default_draws);
  module.def("start_capture", &start_capture);
  module.def("end_capture", [] { capturing = nullptr; });
  module.def("replay", &replay);
  module.def("forget_graph", [](int64_t key) { graphs.erase(key); });
}

}  // namespace pretended

// The device itself: its memory (counted), its one stream, and its random numbers. They are
// registered where PyTorch's CUDA library would register its own.

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace pretended {
namespace {

const c10::Device kDevice(c10::kCUDA, 0);
constexpr size_t kAlignment = 512;  // as CUDA's allocator
std::atomic<int64_t> in_use{0}, peak{0};

struct Block {
  void* start;
  int64_t bytes;
};

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  in_use -= block->bytes;
  std::free(block->start);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&start, kAlignment, bytes), "the pretended device is full");
      std::memset(start, 0x7f, bytes);  // what was never written shows
    }
    const auto now = in_use += static_cast<int64_t>(bytes);
    auto most = peak.load();
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
    return {start, new Block{start, static_cast<int64_t>(bytes)}, &give_back, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

// Everything runs when it is called, in the order of the calls: one stream, events always past.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "invalid device ordinal");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Draws final : c10::GeneratorImpl {
  at::Generator host;

  explicit Draws(at::Generator host)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    auto* shared = const_cast<c10::TensorImpl*>(&state);
    host.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(shared)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.get_state().getIntrusivePtr();
  }
  Draws* clone_impl() const override { return new Draws(host.clone()); }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  void deviceSynchronize(c10::DeviceIndex) const override {}
  c10::Allocator* getCUDADeviceAllocator() const override { return &memory(); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::kCPU);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_draws();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Draws>(at::detail::createCPUGenerator());
  }
};

}  // namespace

c10::Allocator& memory() {
  static Memory one;
  return one;
}
int64_t memory_in_use() { return in_use; }
int64_t memory_peak() { return peak; }
void forget_peak() { peak = in_use.load(); }

const at::Generator& default_draws() {
  static const auto draws = at::make_generator<Draws>(at::detail::createCPUGenerator());
  return draws;
}

at::Generator host_draws(const at::Generator& draws) {
  const auto* ours = dynamic_cast<Draws*>(draws.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours, "Expected a 'cuda' device type for generator but found 'cpu'");
  return ours->host;
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace pretended

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, pretended::Hooks)
}

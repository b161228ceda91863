#include "buffer.h"

#include <algorithm>
#include <mutex>
#include <new>

#include <sys/mman.h>

namespace tenure {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kMapping = std::size_t{64} << 20;  // address space only: pages come when touched

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// Zeroed pages; aligned to a huge page and advised to use them when there is room for one.
std::shared_ptr<void> map(std::size_t bytes) {
    const bool huge = bytes >= kHugePage;
    const std::size_t size = round_up(bytes, 4096) + (huge ? kHugePage : 0);
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<std::size_t>(base);
    void* start = huge ? reinterpret_cast<void*>(round_up(address, kHugePage)) : base;
#if defined(MADV_HUGEPAGE)
    // Advice only: where the kernel has no huge pages everything runs the same, some percent slower.
    if (huge) static_cast<void>(madvise(start, bytes, MADV_HUGEPAGE));
#endif
    return std::shared_ptr<void>(start, [base, size](void*) { munmap(base, size); });
}

// The mapping that shared buffers are being cut from. It is held weakly: only the buffers keep it alive.
struct Current {
    std::mutex mutex;
    std::weak_ptr<void> mapping;
    std::size_t size = 0;
    std::size_t used = 0;
};

Current& current() {
    static Current instance;
    return instance;
}

}  // namespace

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes > 0) data_ = map(bytes);
}

Buffer Buffer::shared(std::size_t bytes) {
    Current& now = current();
    const std::lock_guard lock(now.mutex);
    std::shared_ptr<void> mapping = now.mapping.lock();
    const std::size_t size = round_up(bytes, kLine);
    if (mapping == nullptr || now.used + size > now.size) {
        now.size = std::max(kMapping, size);
        mapping = map(now.size);
        now.mapping = mapping;
        now.used = 0;
    }
    char* start = static_cast<char*>(mapping.get()) + now.used;
    now.used += size;
    return Buffer(std::shared_ptr<void>(std::move(mapping), start), bytes);
}

}  // namespace tenure

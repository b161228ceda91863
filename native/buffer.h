// Owned bytes: zeroed, page aligned, advised to use huge pages when large.
#pragma once

#include <cstddef>
#include <utility>

namespace tenure {

class Buffer {
public:
    Buffer() = default;
    explicit Buffer(std::size_t bytes);  // throws std::bad_alloc
    ~Buffer();
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }

    std::size_t bytes() const { return bytes_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }

    // At least `bytes` bytes; what was held before is lost when it has to grow.
    void reserve(std::size_t bytes) {
        if (bytes > bytes_) *this = Buffer(bytes);
    }

private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace tenure

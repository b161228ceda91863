// Owned bytes: zeroed, 64-byte aligned, on huge pages where the system has them.
#pragma once

#include <cstddef>
#include <memory>

namespace tenure {

class Buffer {
public:
    Buffer() = default;

    // Bytes of its own. Throws std::bad_alloc.
    explicit Buffer(std::size_t bytes);

    // Bytes cut from a mapping shared with its neighbours, for what is loaded once and lives long: a hundred weight
    // matrices of half a megabyte each get huge pages without rounding each of them up to two megabytes. The mapping
    // goes when the last buffer in it goes. Thread safe. Throws std::bad_alloc.
    static Buffer shared(std::size_t bytes);

    std::size_t bytes() const { return bytes_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_.get());
    }

    // At least `bytes` bytes; what was held before is lost when it has to grow.
    void reserve(std::size_t bytes) {
        if (bytes > bytes_) *this = Buffer(bytes + bytes / 4);
    }

private:
    Buffer(std::shared_ptr<void> data, std::size_t bytes) : data_(std::move(data)), bytes_(bytes) {}

    std::shared_ptr<void> data_;
    std::size_t bytes_ = 0;
};

}  // namespace tenure

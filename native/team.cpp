#include "team.h"

#include <chrono>
#include <stdexcept>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tenure {
namespace {

constexpr int kItemBits = 24;
constexpr uint64_t kItemMask = (uint64_t{1} << kItemBits) - 1;
// Long enough to bridge the gaps between the regions of one step, short enough to give the core back when idle.
constexpr auto kSpin = std::chrono::microseconds(40);

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Spins until `done` holds or kSpin is over; says which.
template <class Done>
bool spin(Done done) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

// Marks the team as in use for the life of a region.
class Claim {
public:
    explicit Claim(std::atomic<bool>& busy) : busy_(busy) {
        if (busy_.exchange(true, std::memory_order_acquire)) {
            throw std::logic_error("Team::run: nested or concurrent use of one team");
        }
    }
    ~Claim() { busy_.store(false, std::memory_order_release); }

private:
    std::atomic<bool>& busy_;
};

}  // namespace

int Team::cores() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const unsigned count = std::thread::hardware_concurrency();
    return count == 0 ? 1 : static_cast<int>(count);
}

Team::Team(int threads) {
    if (threads < 0) throw std::invalid_argument("Team: threads must be >= 0");
    if (threads == 0) threads = cores();
    workers_.reserve(threads - 1);
    for (int thread = 1; thread < threads; ++thread) {
        workers_.emplace_back([this, thread] { serve(thread); });
    }
}

Team::~Team() {
    stop_.store(true);
    bell_.fetch_add(1);
    bell_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Team::run_region(int items, Call call, void* body) {
    if (items <= 0) return;
    if (static_cast<uint64_t>(items) > kItemMask) throw std::length_error("Team::run: too many items");
    const Claim claim(busy_);
    if (items == 1 || workers_.empty()) {
        for (int item = 0; item < items; ++item) call(body, item, 0);
        return;
    }
    call_ = call;
    body_ = body;
    items_ = static_cast<uint32_t>(items);
    failed_.store(false, std::memory_order_relaxed);
    open_.store(items_, std::memory_order_relaxed);
    const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> kItemBits) + 1;
    // Sequentially consistent together with `sleepers_`: either a worker about to sleep sees the ticket, or we see it.
    ticket_.store((epoch << kItemBits) | items_);
    if (sleepers_.load() > 0) {
        bell_.fetch_add(1);
        bell_.notify_all();
    }
    while (work_one(0)) {
    }
    await_region();
    if (failed_.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool Team::has_work() const { return (ticket_.load() & kItemMask) != 0; }

bool Team::work_one(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_relaxed);
    do {
        if ((ticket & kItemMask) == 0) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_relaxed));
    perform(static_cast<int>(items_ - (ticket & kItemMask)), thread);
    return true;
}

void Team::perform(int item, int thread) {
    if (!failed_.load(std::memory_order_relaxed)) {
        try {
            call_(body_, item, thread);
        } catch (...) {
            if (!failed_.exchange(true)) error_ = std::current_exception();
        }
    }
    // The last item opens the way for the caller; everything written by any item happens before it returns.
    if (open_.fetch_sub(1, std::memory_order_acq_rel) == 1) open_.notify_one();
}

void Team::await_region() {
    const auto complete = [this] { return open_.load(std::memory_order_acquire) == 0; };
    if (spin(complete)) return;
    for (uint32_t left = open_.load(std::memory_order_acquire); left != 0; left = open_.load(std::memory_order_acquire)) {
        open_.wait(left, std::memory_order_acquire);
    }
}

bool Team::await_work() {
    if (spin([this] { return has_work() || stop_.load(std::memory_order_relaxed); })) return !stop_.load();
    const uint32_t bell = bell_.load();
    sleepers_.fetch_add(1);
    if (!has_work() && !stop_.load()) bell_.wait(bell);
    sleepers_.fetch_sub(1);
    return !stop_.load();
}

void Team::serve(int thread) {
    do {
        while (work_one(thread)) {
        }
    } while (await_work());
}

}  // namespace tenure

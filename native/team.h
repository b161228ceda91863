// A team of threads that shares the items of one region at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>

namespace tenure {

// The caller works too. `run` returns when every item is complete; it never waits for a worker that claimed nothing, so
// a worker the operating system has descheduled costs nothing. Idle workers spin for some tens of microseconds, then
// sleep. One caller at a time: a nested or concurrent `run` throws std::logic_error.
class Team {
public:
    // threads >= 1, counting the caller; 0 = all cores this process may run on.
    explicit Team(int threads = 0);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls f(item, thread) for every item in [0, items), in ascending order of claiming; thread is in [0, threads()).
    // When items throw, the others may be skipped and the first exception is rethrown here.
    template <class F>
    void run(int items, F&& f) {
        using Body = std::remove_reference_t<F>;
        run_region(items, [](void* body, int item, int thread) { (*static_cast<Body*>(body))(item, thread); },
                   const_cast<void*>(static_cast<const void*>(&f)));
    }

    // Cores this process may run on.
    static int cores();

private:
    using Call = void (*)(void* body, int item, int thread);

    void run_region(int items, Call call, void* body);
    bool work_one(int thread);
    void perform(int item, int thread);
    void await_region();
    void serve(int thread);
    bool await_work();
    bool has_work() const;

    // (epoch << 24) | items not yet claimed. Claiming is one compare-and-swap on both, so a worker that wakes up late
    // cannot claim from a region that is over; and it reads the fields below only after a claim, while the region is
    // held open by the very item it claimed.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    Call call_ = nullptr;
    void* body_ = nullptr;
    uint32_t items_ = 0;
    std::exception_ptr error_;

    alignas(64) std::atomic<uint32_t> open_{0};  // items of this region not yet complete
    std::atomic<bool> failed_{false};
    std::atomic<bool> busy_{false};

    alignas(64) std::atomic<uint32_t> bell_{0};      // what sleeping workers wait on
    std::atomic<uint32_t> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::vector<std::thread> workers_;
};

}  // namespace tenure

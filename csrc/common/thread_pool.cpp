// See thread_pool.h. Compiled once, for the baseline instruction set.
#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tlt {
namespace {

constexpr int kMaxWorkers = 255;
constexpr int kSpins =
    4000;  // about 0.1 ms: longer than the gaps within a step, shorter than those between steps
constexpr int64_t kMaxTasks = (int64_t{1} << 32) - 1;

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The state of the current job in one word, so that a claim is one compare-and-swap: how many
// workers may help, and how many tasks are unclaimed. A claim that succeeds proves that the current
// job is not over, so its other fields may be read.
struct Ticket {
    static uint64_t make(int helpers, int64_t unclaimed) {
        return static_cast<uint64_t>(helpers) << 32 | static_cast<uint64_t>(unclaimed);
    }
    static int helpers(uint64_t word) { return static_cast<int>(word >> 32); }
    static int64_t unclaimed(uint64_t word) { return static_cast<int64_t>(word & 0xffffffff); }
};

class Pool {
  public:
    static Pool& instance() {
        static Pool* pool = make();  // never destroyed: workers live as long as the process
        return *pool;
    }

    void run(int num_threads, int64_t num_tasks, TaskFn fn, void* context) {
        if (num_threads <= 1 || num_tasks <= 1 || num_tasks > kMaxTasks || !busy_.try_lock()) {
            for (int64_t i = 0; i < num_tasks; i++) fn(context, i);
            return;
        }
        const int64_t wanted = num_threads - 1 < num_tasks - 1 ? num_threads - 1 : num_tasks - 1;
        const int helpers = static_cast<int>(wanted < kMaxWorkers ? wanted : kMaxWorkers);
        while (num_workers_ < helpers) start_worker();
        publish(helpers, num_tasks, fn, context);
        while (claim_and_run(-1)) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != num_tasks; spins++) {
            if (spins < kSpins) {
                pause_briefly();
            } else {
                sched_yield();
            }
        }
        busy_.unlock();
    }

  private:
    static Pool* make() {
        // A forked child has none of the threads: it starts its own when it needs them.
        pthread_atfork([] { instance().busy_.lock(); }, [] { instance().busy_.unlock(); },
                       [] {
                           instance().num_workers_ = 0;
                           instance().num_parked_.store(0);
                           instance().busy_.unlock();
                       });
        return new Pool;
    }

    void start_worker() {
        std::thread([this, index = num_workers_] { work(index); }).detach();
        num_workers_++;
    }

    void publish(int helpers, int64_t num_tasks, TaskFn fn, void* context) {
        fn_ = fn;
        context_ = context;
        num_tasks_ = num_tasks;
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(Ticket::make(helpers, num_tasks));
        bell_.fetch_add(
            1);  // sequentially consistent, with num_parked_: no worker sleeps through it
        if (num_parked_.load() > 0) bell_.notify_all();
    }

    // Runs one task of the current job; false if there is none for this thread (-1: the caller).
    bool claim_and_run(int worker) {
        uint64_t word = ticket_.load(std::memory_order_acquire);
        do {
            if (Ticket::unclaimed(word) == 0 || worker >= Ticket::helpers(word)) return false;
        } while (!ticket_.compare_exchange_weak(word, word - 1, std::memory_order_acq_rel,
                                                std::memory_order_acquire));
        fn_(context_, num_tasks_ - Ticket::unclaimed(word));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void work(int index) {
        for (;;) {
            const uint32_t heard = bell_.load();
            int spins = 0;
            while (!claim_and_run(index)) {
                if (spins++ < kSpins) {
                    pause_briefly();
                    continue;
                }
                num_parked_.fetch_add(1);
                bell_.wait(heard);
                num_parked_.fetch_sub(1);
                break;
            }
        }
    }

    std::mutex busy_;
    int num_workers_ = 0;  // under busy_
    TaskFn fn_ = nullptr;
    void* context_ = nullptr;
    int64_t num_tasks_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> bell_{0};
    std::atomic<int> num_parked_{0};
};

}  // namespace

void run_tasks(int num_threads, int64_t num_tasks, TaskFn fn, void* context) {
    Pool::instance().run(num_threads, num_tasks, fn, context);
}

}  // namespace tlt

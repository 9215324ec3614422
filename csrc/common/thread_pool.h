// Threads for kernels: tasks of one job, claimed one by one by whoever has time.
//
// Owns the worker threads. Does not know what a task computes. Why not OpenMP: a parallel region
// waits for every thread of its team, so on a machine that others use too (a trainer, a test suite)
// each of the 270 regions of a step waits for the scheduler, and a step of 10 ms takes a second.
// Here the caller claims what no worker has claimed: a worker that is not on a core costs nothing
// but its help. Invariants: every task runs exactly once and is over when run_tasks returns; which
// thread runs it is arbitrary.
#pragma once

#include <cstdint>

namespace tlt {

using TaskFn = void (*)(void* context, int64_t task);

// Calls fn(context, i) for each i in [0, num_tasks), on at most num_threads threads, the caller
// among them. Tasks must not throw and must not call run_tasks. While another thread runs a job,
// the caller does its own alone.
void run_tasks(int num_threads, int64_t num_tasks, TaskFn fn, void* context);

}  // namespace tlt

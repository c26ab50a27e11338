/* Work shared among threads that live as long as one call. So there is nothing that a fork could break, and to make
   one takes some microseconds; each gets at least a hundred of work. */

#ifndef BANDMF_THREADS_H
#define BANDMF_THREADS_H

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif

#define BANDMF_MOST_THREADS 256

/* Call take(work) in so many threads, this one among them, and wait. Where one cannot be made, the others do its
   share: `take` fetches pieces of the work until none is left. */
static inline void bandmf_share(void *(*take)(void *), void *work, int threads) {
    pthread_t others[BANDMF_MOST_THREADS];
    int made = 0;
    while (made + 1 < threads && made < BANDMF_MOST_THREADS && !pthread_create(&others[made], NULL, take, work)) made++;
    take(work);
    for (int k = 0; k < made; k++) pthread_join(others[k], NULL);
}

static inline int bandmf_at_most(int threads, int64_t useful) {
    return useful >= threads ? threads : useful < 1 ? 1 : (int)useful;
}

/* Cores that this process may run on, fewer where OMP_NUM_THREADS says so; as `threads` of native/loading.py. */
static inline int bandmf_cores(void) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__) && defined(CPU_COUNT)
    cpu_set_t mine;
    if (!sched_getaffinity(0, sizeof mine, &mine)) cores = CPU_COUNT(&mine);
#endif
    const char *wanted = getenv("OMP_NUM_THREADS");
    const int limit = wanted ? atoi(wanted) : 0;
    return limit > 0 && limit < cores ? limit : cores > 0 ? (int)cores : 1;
}

#endif

/* Work shared among threads that live as long as one call. So there is nothing that a fork could break, and to make
   one takes some microseconds; each gets at least a hundred of work. */

#ifndef BANDMF_THREADS_H
#define BANDMF_THREADS_H

#include <pthread.h>
#include <stdint.h>

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

#endif

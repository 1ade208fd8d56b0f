/*
 * The parts of a decode step for which torch has no good call: products of a handful of rows with a large matrix, and
 * attention to a cache. A row's numbers never depend on the rows beside it, and all sums of a tile stay in registers.
 */

#include "kernels.h"

#define PANEL (WIDE * LANES)
/* Weights are fetched this many steps before they are needed: the processor alone reads half as fast. */
#define AHEAD 24
/* Tokens whose scores are held at a time, and the widest head. */
#define BLOCK 64
#define WIDEST 512

const int NAME(panel) = PANEL;
const int NAME(lanes) = LANES;
const int NAME(widest) = WIDEST;
const char NAME(digest)[] = DIGEST; /* of all sources and of what builds them */

void (*in_parallel)(void (*)(void *), void *, unsigned, unsigned);
int (*thread_number)(void);
int (*thread_count)(void);

void NAME(use_threads)(void *parallel, void *number, void *count) {
    in_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    thread_number = (int (*)(void))number;
    thread_count = (int (*)(void))count;
}

/* Adapters: y += x·Aᵀ·Bᵀ, of every row by its own, on top of a product or alone. A and B of the sites that share an input stand below each other. */

struct adapters {
    const float *x; /* [rows, in] */
    float *y; /* [rows, out] */
    float *low; /* [rows, ranks], for what is between */
    const float *down; /* [adapters, ranks, in] */
    const float *up; /* [adapters, ranks, out], scaled; a site's ranks act on its own columns alone */
    const long *order, *starts; /* the rows of each adapter, one adapter after another, and where each begins */
    const long *columns; /* of each site the first and the one behind the last */
    long adapters, sites, rank, in, out;
};

/* x·Aᵀ: a thread has some of the ranks. */
static void reduce(const struct adapters *job, long me, long all) {
    const long ranks = job->sites * job->rank, items = job->adapters * ranks, in = job->in;
    for (long item = items * me / all; item < items * (me + 1) / all; item++) {
        const float *down = job->down + item * in;
        for (long place = job->starts[item / ranks]; place < job->starts[item / ranks + 1]; place++) {
            const float *x = job->x + job->order[place] * in;
            job->low[job->order[place] * ranks + item % ranks] = dot(x, down, in);
        }
    }
}

/* The rest: a thread has some of the columns. */
static void expand(const struct adapters *job, long first, long last) {
    const long ranks = job->sites * job->rank, items = job->adapters * ranks, out = job->out;
    for (long item = 0; item < items; item++) {
        const long *columns = job->columns + 2 * (item % ranks / job->rank);
        const long start = columns[0] > first ? columns[0] : first, stop = columns[1] < last ? columns[1] : last;
        const float *up = job->up + item * out;
        for (long place = job->starts[item / ranks]; place < job->starts[item / ranks + 1]; place++) {
            float *y = job->y + job->order[place] * out;
            const float factor = job->low[job->order[place] * ranks + item % ranks];
            for (long at = start; at < stop; at++) y[at] += factor * up[at];
        }
    }
}

/* Products: y = x·Wᵀ + bias + onto, and adapters. The weight stands in panels of PANEL columns, [panels][in][PANEL]. */

struct product {
    const float *x, *weight, *bias, *onto;
    float *y;
    long rows, out, in;
    const struct adapters *adapters;
    long reduced; /* threads that have done their share of x·Aᵀ */
};

/* The sums of some columns of a row; the last panel may stand over the edge. */
INLINE void finish(const struct product *job, vec found, long row, long column) {
    const long at = row * job->out + column, left = job->out - column;
    if (left >= LANES) {
        if (job->bias) found += load(job->bias + column);
        if (job->onto) found += load(job->onto + at);
        store(job->y + at, found);
        return;
    }
    float last[LANES];
    store(last, found);
    for (long lane = 0; lane < left; lane++) {
        if (job->bias) last[lane] += job->bias[column + lane];
        if (job->onto) last[lane] += job->onto[at + lane];
        job->y[at + lane] = last[lane];
    }
}

INLINE void tile(const struct product *job, const float *weight, long column, long first, const int rows) {
    const long in = job->in;
    const float *x = job->x + first * in;
    vec sums[TILE][WIDE];
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < WIDE; part++) sums[row][part] = (vec){0};
    for (long k = 0; k < in; k++) {
        vec columns[WIDE];
        for (int part = 0; part < WIDE; part++) {
            const float *at = weight + k * PANEL + part * LANES;
            columns[part] = load(at);
            __builtin_prefetch(at + AHEAD * PANEL);
        }
        for (int row = 0; row < rows; row++) {
            const float factor = x[row * in + k];
            for (int part = 0; part < WIDE; part++) sums[row][part] += factor * columns[part];
        }
    }
    for (int row = 0; row < rows; row++)
        for (int part = 0; part < WIDE; part++) finish(job, sums[row][part], first + row, column + part * LANES);
}

static void multiply(void *given) {
    struct product *job = given;
    const long panels = (job->out + PANEL - 1) / PANEL, me = thread_number(), all = thread_count();
    const long start = panels * me / all, stop = panels * (me + 1) / all;
    if (job->adapters) {
        reduce(job->adapters, me, all);
        __atomic_fetch_add(&job->reduced, 1, __ATOMIC_RELEASE);
    }
    for (long panel = start; panel < stop && job->weight; panel++) {
        const float *weight = job->weight + panel * PANEL * job->in;
        const long column = panel * PANEL;
        long first = 0;
        for (; first + TILE <= job->rows; first += TILE) tile(job, weight, column, first, TILE);
        switch (job->rows - first) {
#define REST(count) case count: if (count < TILE) tile(job, weight, column, first, count < TILE ? count : 1); break;
            REST(1) REST(2) REST(3) REST(4) REST(5) REST(6) REST(7) REST(8) REST(9) REST(10) REST(11)
        }
    }
    if (job->adapters) {
        /* The others did theirs before their products, so this hardly ever waits. */
        while (__atomic_load_n(&job->reduced, __ATOMIC_ACQUIRE) < all) __builtin_ia32_pause();
        const long last = stop * PANEL < job->out ? stop * PANEL : job->out;
        expand(job->adapters, start * PANEL, last);
    }
}

void NAME(linear)(const float *x, const float *weight, const float *bias, const float *onto, float *y, long rows,
                  long out, long in, const struct adapters *adapters, long threads) {
    struct product job = {x, weight, bias, onto, y, rows, out, in, adapters, 0};
    in_parallel(multiply, &job, (unsigned)threads, 0);
}

void NAME(adapt)(const struct adapters *adapters, long threads) {
    struct product job = {0, 0, 0, 0, 0, 0, adapters->out, 0, adapters, 0};
    in_parallel(multiply, &job, (unsigned)threads, 0);
}

/* One new token of every row: turned by its position, written into the cache, and what it gathers there. */

struct attention {
    float *qkv; /* [rows, heads + 2·key_heads, width], turned in place */
    const float *cosine, *sine; /* [rows, width / 2] */
    float *keys, *values; /* [rows, key_heads, columns, width] */
    const long *held; /* tokens of each row in the cache, on the right, before this one */
    float *gathered; /* [rows, heads, width] */
    float *most, *total; /* [rows, heads]: the largest score, and the sum of e to the scores above it */
    long rows, heads, key_heads, width, columns, column;
    float scale;
};

/* Attention of one query to `count` keys. */
INLINE void look(const struct attention *job, const float *query, const float *keys, const float *values, long count,
                 float *gathered, float *most, float *total) {
    const long width = job->width;
    float found[WIDEST];
    for (long at = 0; at < width; at++) found[at] = 0;
    float largest = -__builtin_inff();
    vec totals = {0};
    for (long start = 0; start < count; start += BLOCK) {
        const long size = count - start < BLOCK ? count - start : BLOCK;
        float scores[BLOCK], before = largest;
        for (long token = 0; token < size; token++) {
            const float *key = keys + (start + token) * width;
            vec products = {0};
            for (long at = 0; at < width; at += LANES) products += load(query + at) * load(key + at);
            scores[token] = sum(products) * job->scale;
            largest = scores[token] > largest ? scores[token] : largest;
        }
        /* Nothing to look at: its shares would be 0 / 0. */
        if (largest == -__builtin_inff() && scores[0] == scores[0]) continue;
        for (long token = size; token < BLOCK; token++) scores[token] = -__builtin_inff();
        const vec faded = exponential((vec){0} + (before - largest));
        totals *= faded;
        for (long at = 0; at < width; at += LANES) store(found + at, load(found + at) * faded);
        for (long token = 0; token < BLOCK; token += LANES) {
            const vec share = exponential(load(scores + token) - largest);
            store(scores + token, share);
            totals += share;
        }
        for (long token = 0; token < size; token++) {
            const float *value = values + (start + token) * width;
            for (long at = 0; at < width; at += LANES)
                store(found + at, load(found + at) + scores[token] * load(value + at));
        }
    }
    *most = largest;
    *total = sum(totals);
    const vec share = (vec){0} + 1.0f / *total;
    for (long at = 0; at < width; at += LANES) store(gathered + at, load(found + at) * share);
}

static void attend_some(void *given) {
    const struct attention *job = given;
    const long width = job->width, group = job->heads / job->key_heads, items = job->rows * job->key_heads;
    const long me = thread_number(), all = thread_count();
    for (long item = items * me / all; item < items * (me + 1) / all; item++) {
        const long row = item / job->key_heads, head = item % job->key_heads;
        const float *cosine = job->cosine + row * width / 2, *sine = job->sine + row * width / 2;
        float *heads = job->qkv + row * (job->heads + 2 * job->key_heads) * width;
        float *key = heads + (job->heads + head) * width, *value = key + job->key_heads * width;
        float *keys = job->keys + item * job->columns * width, *values = job->values + item * job->columns * width;
        turn(key, cosine, sine, width / 2, 1.0f);
        for (long at = 0; at < width; at++) {
            keys[job->column * width + at] = key[at];
            values[job->column * width + at] = value[at];
        }
        const long first = (job->column - job->held[row]) * width;
        for (long one = head * group; one < (head + 1) * group; one++) {
            const long place = row * job->heads + one;
            turn(heads + one * width, cosine, sine, width / 2, 1.0f);
            look(job, heads + one * width, keys + first, values + first, job->held[row] + 1,
                 job->gathered + place * width, job->most + place, job->total + place);
        }
    }
}

void NAME(attend)(const struct attention *job, long threads) {
    in_parallel(attend_some, (void *)job, (unsigned)threads, 0);
}

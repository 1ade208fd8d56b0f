/*
 * What stands between the products of a layer: norms, positions and gates, forward and backward. Rows know nothing of
 * each other: neither the rows beside one nor the number of threads change its numbers.
 */

#include "kernels.h"

struct rows {
    const float *x, *gain, *dy, *onto, *cosine, *sine;
    float *y;
    long rows, width, stride, heads;
    float eps, sign;
    void (*one)(const struct rows *, long);
};

static void some_rows(void *given) {
    const struct rows *job = given;
    const long me = thread_number(), all = thread_count();
    for (long row = job->rows * me / all; row < job->rows * (me + 1) / all; row++) job->one(job, row);
}

static void all_rows(struct rows job, long threads) {
    if (threads > 1) in_parallel(some_rows, &job, (unsigned)threads, 0);
    else
        for (long row = 0; row < job.rows; row++) job.one(&job, row);
}

INLINE float norm_scale(const struct rows *job, const float *x) {
    return 1.0f / __builtin_sqrtf(dot(x, x, job->width) / (float)job->width + job->eps);
}

static void norm_row(const struct rows *job, long row) {
    const float *x = job->x + row * job->width, scale = norm_scale(job, x);
    float *y = job->y + row * job->width;
    for (long at = 0; at < job->width; at++) y[at] = x[at] * scale * job->gain[at];
}

/* The root mean square norm of every row. */
void NAME(norm)(const float *x, const float *gain, float eps, float *y, long rows, long width, long threads) {
    all_rows((struct rows){.x = x, .gain = gain, .eps = eps, .y = y, .rows = rows, .width = width, .one = norm_row},
             threads);
}

static void norm_back_row(const struct rows *job, long row) {
    const long width = job->width;
    const float *x = job->x + row * width, *dy = job->dy + row * width, *gain = job->gain;
    float *dx = job->y + row * width;
    vec products = {0};
    long at = 0;
    for (; at + LANES <= width; at += LANES) products += load(x + at) * load(gain + at) * load(dy + at);
    float total = sum(products);
    for (; at < width; at++) total += x[at] * gain[at] * dy[at];
    const float scale = norm_scale(job, x), back = total / (float)width * scale * scale * scale;
    if (job->onto)
        for (at = 0; at < width; at++)
            dx[at] = gain[at] * dy[at] * scale - x[at] * back + job->onto[row * width + at];
    else
        for (at = 0; at < width; at++) dx[at] = gain[at] * dy[at] * scale - x[at] * back;
}

/* dx = r·(gain·dy − x·r²·mean(gain·dy·x)) + onto, with r the norm's factor. `dx` may be `dy`, `onto` may be null. */
void NAME(norm_back)(const float *x, const float *gain, float eps, const float *dy, const float *onto, float *dx,
                     long rows, long width, long threads) {
    all_rows((struct rows){.x = x, .gain = gain, .eps = eps, .dy = dy, .onto = onto, .y = dx, .rows = rows,
                           .width = width, .one = norm_back_row},
             threads);
}

static void turn_row(const struct rows *job, long row) {
    const long half = job->width / 2;
    for (long head = 0; head < job->heads; head++)
        turn(job->y + row * job->stride + head * job->width, job->cosine + row * half, job->sine + row * half, half,
             job->sign);
}

/* The first `heads` heads of every row turned by its position, in place; with the sign -1 back. */
void NAME(turn)(float *qkv, const float *cosine, const float *sine, float sign, long rows, long heads, long width,
                long stride, long threads) {
    all_rows((struct rows){.y = qkv, .cosine = cosine, .sine = sine, .sign = sign, .rows = rows, .heads = heads,
                           .width = width, .stride = stride, .one = turn_row},
             threads);
}

static void gate_row(const struct rows *job, long row) {
    const float *gate = job->x + row * 2 * job->width, *up = gate + job->width;
    float *y = job->y + row * job->width;
    for (long at = 0; at < job->width; at += LANES) {
        const vec value = load(gate + at);
        store(y + at, value / (1.0f + exponential(-value)) * load(up + at));
    }
}

/* silu(gate)·up, where both stand side by side [rows, 2·width]. A whole number of registers. */
void NAME(gate)(const float *gate_up, float *y, long rows, long width, long threads) {
    all_rows((struct rows){.x = gate_up, .y = y, .rows = rows, .width = width, .one = gate_row}, threads);
}

static void gate_back_row(const struct rows *job, long row) {
    const long width = job->width;
    const float *gate = job->x + row * 2 * width, *up = gate + width, *dy = job->dy + row * width;
    float *dx = job->y + row * 2 * width;
    for (long at = 0; at < width; at += LANES) {
        const vec value = load(gate + at), d = load(dy + at);
        const vec share = 1.0f / (1.0f + exponential(-value)), active = value * share;
        store(dx + at, d * load(up + at) * (share + active * (1.0f - share)));
        store(dx + width + at, d * active);
    }
}

/* d of gate and up, from that of silu(gate)·up. */
void NAME(gate_back)(const float *gate_up, const float *dy, float *dx, long rows, long width, long threads) {
    all_rows((struct rows){.x = gate_up, .dy = dy, .y = dx, .rows = rows, .width = width, .one = gate_back_row},
             threads);
}

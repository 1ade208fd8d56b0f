/*
 * What all kernels share: registers as vectors, the threads of the OpenMP that torch has loaded, a few formulas.
 *
 * `make kernels` builds all for x86-64 Linux, once for AVX2 and once for AVX-512, and what it builds is shipped: users
 * need no compiler. Elsewhere torch does the same, slower. Plain C, float32, no library.
 *
 * LANES numbers in a register; WIDE registers of a panel's columns and TILE rows at a time in a product of few rows.
 */

#define JOIN(a, b, c) a##b##c
#define NAMED(a, b, c) JOIN(a, b, c)
#define NAME(function) NAMED(function, _, VARIANT)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int ints __attribute__((vector_size(4 * LANES), aligned(4)));

/* OpenMP, as GCC calls it; handed over once, before anything else is called. */
#define HIDDEN __attribute__((visibility("hidden")))
#define in_parallel NAME(in_parallel)
#define thread_number NAME(thread_number)
#define thread_count NAME(thread_count)
extern HIDDEN void (*in_parallel)(void (*)(void *), void *, unsigned, unsigned);
extern HIDDEN int (*thread_number)(void);
extern HIDDEN int (*thread_count)(void);

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }

INLINE float sum(vec value) {
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += value[lane];
    return total;
}

INLINE vec pick(ints where, vec one, vec other) { return (vec)((where & (ints)one) | (~where & (ints)other)); }

/* e to the power of x, to 2 units in the last place; 0 far below, infinity far above, NaN for NaN. */
INLINE vec exponential(vec x) {
    const float magic = 12582912.0f; /* adding it leaves no room for a fraction */
    vec shifted = x * 1.44269504088896341f + magic, whole = shifted - magic;
    vec rest = x - whole * 0.693145751953125f - whole * 1.42860677e-6f;
    vec power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    ints two = ((ints)shifted - (ints)((vec){0} + magic) + 127) << 23;
    vec found = power * (vec)two;
    found = pick(x < -87.0f, (vec){0}, found);
    found = pick(x > 88.0f, (vec){0} + __builtin_inff(), found);
    return pick(x != x, x, found);
}

/* A head turned by its position; with the sign -1 turned back. */
INLINE void turn(float *head, const float *cosine, const float *sine, long half, const float sign) {
    for (long at = 0; at < half; at++) {
        const float one = head[at], other = head[half + at];
        head[at] = one * cosine[at] - sign * other * sine[at];
        head[half + at] = other * cosine[at] + sign * one * sine[at];
    }
}

/* The inner product. */
INLINE float dot(const float *one, const float *other, long width) {
    vec products = {0};
    long at = 0;
    for (; at + LANES <= width; at += LANES) products += load(one + at) * load(other + at);
    float total = sum(products);
    for (; at < width; at++) total += one[at] * other[at];
    return total;
}

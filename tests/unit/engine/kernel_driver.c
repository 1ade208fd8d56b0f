/*
 * Runs the kernels outside of Python: reads calls from standard input, writes their results to standard output.
 *
 * It is for processors that this Python cannot load a library for: built for aarch64, it runs under qemu, and
 * kernel_driver.py sends it the calls that the tests make. A call is the name of a kernel, the number of threads, numbers
 * (int64) and arrays, each with its length in bytes (int64) in front. POSIX threads take the place of OpenMP's: they must
 * run at the same time, since threads of a kernel may wait for each other.
 */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define JOIN(a, b, c) a##b##c
#define NAMED(a, b, c) JOIN(a, b, c)
#define NAME(function) NAMED(function, _, VARIANT)

struct decode_lora {
    const float *x;
    float *y, *low;
    const float *down, *up;
    const long *order, *starts, *columns;
    long adapters, sites, rank, in, out;
};
struct attention {
    float *qkv;
    const float *cosine, *sine;
    float *keys, *values;
    const long *lengths;
    float *out, *largest, *sum_exp;
    long rows, heads, key_heads, width, columns, column;
    float scale;
};
struct lora_site {
    const float *a, *b;
    float *da, *db;
    long start, stop, first, columns, rank, low, b_t;
    float scale;
};
struct lora_batch {
    const float *x, *dy;
    float *y, *low, *dlow, *b_t;
    const struct lora_site *sites;
    long count, rows, in, out, ranks;
};

extern const int NAME(panel), NAME(lanes);
extern const char NAME(digest)[];
void NAME(use_threads)(void *, void *, void *);
void NAME(linear)(const float *, const float *, const float *, const float *, float *, long, long, long,
                  const struct decode_lora *, long);
void NAME(lora_decode)(const struct decode_lora *, long);
void NAME(attend)(const struct attention *, long);
void NAME(rmsnorm)(const float *, const float *, float, float *, long, long, long);
void NAME(rmsnorm_backward)(const float *, const float *, float, const float *, const float *, float *, long, long, long);
void NAME(rope)(float *, const float *, const float *, float, long, long, long, long, long);
void NAME(swiglu)(const float *, float *, long, long, long);
void NAME(swiglu_backward)(const float *, const float *, float *, long, long, long);
void NAME(lora_forward)(struct lora_batch *, long);
void NAME(lora_backward)(struct lora_batch *, long);

/* Threads */

static __thread int my_number;
static __thread int team_size = 1;
struct member {
    void (*work)(void *);
    void *argument;
    int number, count;
    pthread_t thread;
};

static void *work_as(void *argument) {
    struct member *member = argument;
    my_number = member->number;
    team_size = member->count;
    member->work(member->argument);
    return 0;
}

static void run_team(void (*work)(void *), void *argument, unsigned count, unsigned flags) {
    struct member team[16];
    (void)flags;
    for (unsigned number = 0; number < count; number++) {
        team[number] = (struct member){work, argument, (int)number, (int)count, 0};
        if (number) pthread_create(&team[number].thread, 0, work_as, &team[number]);
    }
    work_as(&team[0]);
    for (unsigned number = 1; number < count; number++) pthread_join(team[number].thread, 0);
    my_number = 0;
    team_size = 1;
}

static int number_of_thread(void) { return my_number; }
static int count_of_threads(void) { return team_size; }

/* Reading and writing */

static long number(void) {
    long value;
    if (fread(&value, sizeof value, 1, stdin) != 1) exit(3);
    return value;
}

/* An array, or null if it is empty. */
static void *array(void) {
    const long bytes = number();
    char *data = bytes ? malloc((size_t)bytes) : 0;
    if (bytes && fread(data, 1, (size_t)bytes, stdin) != (size_t)bytes) exit(3);
    return data;
}

static float *room(long count) { return calloc((size_t)(count > 0 ? count : 1), sizeof(float)); }

static void write_floats(const float *data, long count) { fwrite(data, sizeof(float), (size_t)count, stdout); }

static struct decode_lora *read_decode_lora(void) {
    struct decode_lora *lora = calloc(1, sizeof *lora);
    lora->down = array(), lora->up = array();
    lora->order = array(), lora->starts = array(), lora->columns = array();
    lora->adapters = number(), lora->sites = number(), lora->rank = number(), lora->in = number(), lora->out = number();
    return lora;
}

static int run_call(const char *name) {
    const long threads = number();
    if (!strcmp(name, "about")) {
        const long about[] = {NAME(panel), NAME(lanes)};
        fwrite(about, sizeof about, 1, stdout);
        fwrite(NAME(digest), 1, 64, stdout);
    } else if (!strcmp(name, "linear")) {
        const long rows = number(), out = number(), in = number(), has_lora = number();
        float *x = array(), *weight = array(), *bias = array(), *residual = array(), *y = room(rows * out);
        struct decode_lora *lora = has_lora ? read_decode_lora() : 0;
        if (lora) lora->x = x, lora->y = y, lora->low = room(rows * lora->sites * lora->rank);
        NAME(linear)(x, weight, bias, residual, y, rows, out, in, lora, threads);
        write_floats(y, rows * out);
    } else if (!strcmp(name, "lora_decode")) {
        const long rows = number();
        float *x = array(), *y = array();
        struct decode_lora *lora = read_decode_lora();
        lora->x = x, lora->y = y, lora->low = room(rows * lora->sites * lora->rank);
        NAME(lora_decode)(lora, threads);
        write_floats(y, rows * lora->out);
    } else if (!strcmp(name, "attend")) {
        struct attention job = {.rows = number()};
        job.heads = number(), job.key_heads = number(), job.width = number();
        job.columns = number(), job.column = number();
        job.qkv = array(), job.cosine = array(), job.sine = array(), job.keys = array(), job.values = array();
        job.lengths = array();
        float *scale = array();
        job.scale = *scale;
        const long items = job.rows * job.heads, cached = job.rows * job.key_heads * job.columns * job.width;
        job.out = room(items * job.width), job.largest = room(items), job.sum_exp = room(items);
        NAME(attend)(&job, threads);
        write_floats(job.out, items * job.width);
        write_floats(job.largest, items);
        write_floats(job.sum_exp, items);
        write_floats(job.keys, cached);
        write_floats(job.values, cached);
        write_floats(job.qkv, job.rows * (job.heads + 2 * job.key_heads) * job.width);
    } else if (!strcmp(name, "rmsnorm")) {
        const long rows = number(), width = number();
        float *x = array(), *gain = array(), *eps = array(), *y = room(rows * width);
        NAME(rmsnorm)(x, gain, *eps, y, rows, width, threads);
        write_floats(y, rows * width);
    } else if (!strcmp(name, "rmsnorm_backward")) {
        const long rows = number(), width = number();
        float *x = array(), *gain = array(), *eps = array(), *dy = array(), *residual = array();
        NAME(rmsnorm_backward)(x, gain, *eps, dy, residual, dy, rows, width, threads);
        write_floats(dy, rows * width);
    } else if (!strcmp(name, "rope")) {
        const long rows = number(), heads = number(), width = number(), stride = number(), sign = number();
        float *qkv = array(), *cosine = array(), *sine = array();
        NAME(rope)(qkv, cosine, sine, (float)sign, rows, heads, width, stride, threads);
        write_floats(qkv, rows * stride);
    } else if (!strcmp(name, "swiglu")) {
        const long rows = number(), width = number();
        float *gate_up = array(), *y = room(rows * width);
        NAME(swiglu)(gate_up, y, rows, width, threads);
        write_floats(y, rows * width);
    } else if (!strcmp(name, "swiglu_backward")) {
        const long rows = number(), width = number();
        float *gate_up = array(), *dy = array(), *dx = room(2 * rows * width);
        NAME(swiglu_backward)(gate_up, dy, dx, rows, width, threads);
        write_floats(dx, 2 * rows * width);
    } else if (!strcmp(name, "lora_forward") || !strcmp(name, "lora_backward")) {
        struct lora_batch job = {.count = number()};
        job.rows = number(), job.in = number(), job.out = number(), job.ranks = number();
        const long transposed = number();
        struct lora_site *sites = calloc((size_t)job.count, sizeof *sites);
        for (long index = 0; index < job.count; index++) {
            struct lora_site *site = sites + index;
            site->start = number(), site->stop = number(), site->first = number(), site->columns = number();
            site->rank = number(), site->low = number(), site->b_t = number();
            site->a = array(), site->b = array(), site->da = array(), site->db = array();
            float *scale = array();
            site->scale = *scale;
        }
        job.sites = sites;
        job.x = array(), job.dy = array(), job.y = array();
        job.low = room(job.rows * job.ranks), job.dlow = room(job.rows * job.ranks), job.b_t = room(transposed);
        if (!strcmp(name, "lora_forward")) {
            NAME(lora_forward)(&job, threads);
            write_floats(job.y, job.rows * job.out);
        } else {
            NAME(lora_backward)(&job, threads);
            if (job.y) write_floats(job.y, job.rows * job.in);
            for (long index = 0; index < job.count; index++) {
                write_floats(sites[index].da, sites[index].rank * job.in);
                write_floats(sites[index].db, sites[index].rank * sites[index].columns);
            }
        }
    } else {
        return 2;
    }
    return 0;
}

int main(void) {
    NAME(use_threads)((void *)run_team, (void *)number_of_thread, (void *)count_of_threads);
    char name[32];
    while (fread(name, sizeof name, 1, stdin) == 1) {
        const int code = run_call(name);
        if (code) return code;
        fflush(stdout);
    }
    return 0;
}

"""The source of cpu_kernel.py, in C with the vectors of GCC: triangles of linear attention, sums of
decays, and dropout.

D and E are padded with zeros to multiples of ROWS, and the last chunk to C tokens. Tensors may have any strides except
within a row; a reversed text has a negative token stride.
"""

SOURCE = r"""
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE__
#include <immintrin.h>
static unsigned flush_denormals(void) { unsigned mode = _mm_getcsr(); _mm_setcsr(mode | 0x8040); return mode; }
static void restore(unsigned mode) { _mm_setcsr(mode); }
#else
static unsigned flush_denormals(void) { return 0; }
static void restore(unsigned mode) {}
#endif

// A vector has W numbers; NV of them, times 6 rows, leave registers for operands.
#if defined(__AVX512F__)
enum { W = 16, NV = 4 };
#elif defined(__AVX2__)
enum { W = 8, NV = 2 };
#elif defined(__aarch64__)
enum { W = 4, NV = 4 };
#else
enum { W = 4, NV = 2 };
#endif
enum { C = 32, ROWS = 16 };  // tokens of a chunk, and what all padded sizes are multiples of
enum { SPAN = 64 };  // tokens between the boundaries at which flows are measured
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef double vd __attribute__((vector_size(W * 4)));  // half as many
typedef float half __attribute__((vector_size(W * 2)));

// A tensor of rows of adjacent numbers, (batch, head, token, row); strides in numbers.
struct view { const void *data; int64_t batch, head, token, is_bf16; };

static const void *row(const struct view *x, int64_t b, int64_t h, int64_t t, int size) {
    return (const char *)x->data + (b * x->batch + h * x->head + t * x->token) * size;
}

static void load(float *to, const struct view *x, int64_t b, int64_t h, int64_t t, int n, float scale) {
    if (x->is_bf16) {
        const uint16_t *from = row(x, b, h, t, 2);
        for (int i = 0; i < n; i++) {
            union { uint32_t bits; float number; } wide = {(uint32_t)from[i] << 16};
            to[i] = scale * wide.number;
        }
    } else {
        const float *from = row(x, b, h, t, 4);
        for (int i = 0; i < n; i++) to[i] = scale * from[i];
    }
}

static void prefetch(const struct view *x, int64_t b, int64_t h, int64_t t, int n) {
    int size = x->is_bf16 ? 2 : 4;
    const char *from = row(x, b, h, t, size);
    for (int i = 0; i < n * size; i += 64) __builtin_prefetch(from + i);
}

// e^r - 1, and n at the place of exponents, for x = n log 2 + r.
static inline vf of_remainder(vf x, vi *exponent) {
    vf n = x * 1.44269504f + 12582912.0f;  // the nearest integer, in the low bits
    *exponent = (vi)n << 23;
    n -= 12582912.0f;
    vf r = x - n * 0.693145752f - n * 1.42860677e-6f;
    vf p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    return p * r;
}

// e^x to two units in the last place; 0 below -60, as products with ordinary numbers would soon be denormal.
static inline vf exponential(vf x) {
    vi exponent, infinite = x > 88.7f;
    vf p = of_remainder(x, &exponent) + 1.0f;
    return (vf)((((vi)p + exponent) & ~(x <= -60.0f) & ~infinite) | (infinite & 0x7f800000));
}

// y = βy + a b for R rows of a and y, and N vectors of b and y. Loops over constants are unrolled from the start: GCC
// otherwise carries the sums to the product and back through memory.
#define EACH(COUNT) _Pragma("GCC unroll 32") for (int n = 0; n < COUNT; n++)
#define TILE(R, N) \
static void tile_##R##_##N(long depth, const float *a, long a_row, long a_column, const float *b, long b_row, \
                           float *y, long y_row, float beta) { \
    vf sums[R * N]; \
    EACH(R * N) sums[n] = beta == 0 ? (vf){0} : beta * *(vf *)(y + n / N * y_row + n % N * W); \
    _Pragma("GCC unroll 2") for (long k = 0; k < depth; k++) { \
        vf right[N]; \
        EACH(N) right[n] = *(const vf *)(b + k * b_row + n * W); \
        EACH(R * N) sums[n] += a[n / N * a_row + k * a_column] * right[n % N]; \
    } \
    EACH(R * N) *(vf *)(y + n / N * y_row + n % N * W) = sums[n]; \
}
TILE(8, 1) TILE(8, 2) TILE(8, 3) TILE(6, 2) TILE(4, 2) TILE(6, 4) TILE(4, 4)

// y = βy + a b, (rows, depth) times (depth, columns); rows a multiple of ROWS, columns of W.
static void multiply(int rows, int depth, int columns, const float *a, int a_row, int a_column, const float *b,
                     int b_row, float *y, int y_row, float beta) {
    for (int n = 0; n < columns; n += NV * W) for (int m = 0; m < rows; m += ROWS) {
        int vectors = (columns - n) / W;
        const float *left = a + m * a_row, *right = b + n;
        float *out = y + m * y_row + n;
#define RUN(R, N, at) tile_##R##_##N(depth, left + (at) * a_row, a_row, a_column, right, b_row, out + (at) * y_row, \
                                     y_row, beta)
        if (vectors >= NV && NV == 4) { RUN(6, 4, 0); RUN(6, 4, 6); RUN(4, 4, 12); }
        else if (vectors >= NV) { RUN(6, 2, 0); RUN(6, 2, 6); RUN(4, 2, 12); }
        else if (vectors == 3) { RUN(8, 3, 0); RUN(8, 3, 8); }
        else if (vectors == 2) { RUN(8, 2, 0); RUN(8, 2, 8); }
        else { RUN(8, 1, 0); RUN(8, 1, 8); }
    }
}

static void transpose(const float *x, int x_row, float *y, int y_row) {  // a W×W tile
#ifdef __clang__
    for (int i = 0; i < W; i++) for (int j = 0; j < W; j++) y[j * y_row + i] = x[i * x_row + j];
#else
    vf rows[W], shuffled[W];
    vi low, high;
    for (int i = 0; i < W; i++) { low[i] = i / 2 + (i & 1) * W; high[i] = low[i] + W / 2; }
    for (int i = 0; i < W; i++) rows[i] = *(const vf *)(x + i * x_row);
    for (int step = 1; step < W; step *= 2) {  // interleaving rows i and i + W/2, log2 W times
        for (int i = 0; i < W / 2; i++) {
            shuffled[2 * i] = __builtin_shuffle(rows[i], rows[i + W / 2], low);
            shuffled[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + W / 2], high);
        }
        for (int i = 0; i < W; i++) rows[i] = shuffled[i];
    }
    for (int i = 0; i < W; i++) *(vf *)(y + i * y_row) = rows[i];
#endif
}

struct problem {
    // With parts > 1, there are no flows and there is no `other`.
    int64_t batch, heads, length, depth, width, diagonal, add, threads, mirrored, parts, reversed;
    double scale;
    const int64_t *order;  // the token at each place, or null; reversed: the places are read from the last to the first
    struct view q, k, v, query, key, given, y, other, dots;
    double *flows;  // (batch, heads, boundaries), or null; those of a call are measured by its mirrored call, the next
};

static double sum_of(const struct view *x, int64_t b, int64_t h, int64_t t) { return *(double *)row(x, b, h, t, 8); }

static int64_t token_at(const struct problem *p, int64_t t) {
    return p->order ? p->order[p->reversed ? p->length - 1 - t : t] : t;
}

static int64_t boundaries(const struct problem *p) { return (p->length - 1) / SPAN; }

static int round_up(int64_t n) { return (n + ROWS - 1) / ROWS * ROWS; }

// Not the padding, which must stay 0 even where a weight is NaN.
static void scale_rows(float *x, int x_row, const float *weights, int rows, int n) {
    for (int i = 0; i < rows; i++) {
        const float weight = weights[i];
        for (int j = 0; j < n; j++) x[i * x_row + j] *= weight;
    }
}

static struct view from_column(struct view x, int64_t column) {
    x.data = (const char *)x.data + column * (x.is_bf16 ? 2 : 4);
    return x;
}

// A part is some adjacent columns of v and y. No column depends on another.
static void triangle_head(const struct problem *whole, int64_t b, int64_t h, int64_t part, float *memory) {
    struct problem of_part = *whole;
    const struct problem *p = &of_part;
    const int64_t columns = round_up((p->width + p->parts - 1) / p->parts), first = part * columns;
    of_part.v = from_column(p->v, first);
    of_part.y = from_column(p->y, first);
    of_part.width = p->width - first < columns ? p->width - first : columns;
    if (p->width <= 0) return;
    // Copies of sizes: a loop that stores numbers might change p->width, and could then not use vectors.
    const int D = round_up(p->depth), E = round_up(p->width), depth = p->depth, width = p->width;
    float *Q = memory, *K = Q + C * D, *KT = K + C * D, *V = KT + C * D, *Y = V + C * E, *A = Y + C * E;
    float *other = A + C * C, *S = other + E, *recorded = S + D * E;  // S at each boundary, for the mirrored call
    if (D != depth) memset(K, 0, sizeof(float) * C * D);  // columns that are padding
    if (E != width) memset(V, 0, sizeof(float) * C * E), memset(other, 0, sizeof(float) * E);
    int64_t token[C];
    double from_entry[2][C];
    float high[2][C] __attribute__((aligned(64))), low[2][C] __attribute__((aligned(64)));
    float query_weight[C] __attribute__((aligned(64))), key_weight[C] __attribute__((aligned(64))), own[C];
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    // A state, S, enters a chunk decayed up to its first query, as everywhere in this package.
    double entry = sum_of(&p->query, b, h, token_at(p, 0));
    int n = p->mirrored && p->length % C ? p->length % C : C;  // boundaries lie where those of the other calls do
    for (int64_t t = 0; t < p->length; t += n, n = C) {
        if (n > p->length - t) n = p->length - t;
        const int last = t + n == p->length;
        // Between the same two tokens as in the other calls, that is at the key of the last where both are exchanged.
        const double exit = last ? entry
            : p->mirrored ? sum_of(&p->key, b, h, token_at(p, t + n - 1)) : sum_of(&p->query, b, h, token_at(p, t + n));
        for (int i = 0; i < n; i++) {
            token[i] = token_at(p, t + i);
            prefetch(&p->y, b, h, token[i], p->width);
        }
        for (int64_t next = t + n; next < t + n + C && next < p->length; next++) {
            const int64_t at = token_at(p, next);
            prefetch(&p->q, b, h, at, p->depth);
            prefetch(&p->k, b, h, at, p->depth);
            prefetch(&p->v, b, h, at, p->width);
        }
        for (int i = 0; i < n; i++) {
            load(Q + i * D, &p->q, b, h, token[i], p->depth, p->scale);
            load(K + i * D, &p->k, b, h, token[i], p->depth, 1);
            load(V + i * E, &p->v, b, h, token[i], p->width, 1);
            from_entry[0][i] = sum_of(&p->query, b, h, token[i]) - entry;
            from_entry[1][i] = sum_of(&p->key, b, h, token[i]) - entry;
        }
        for (int i = n; i < C; i++) {  // nothing, at the end of the text
            memset(Q + i * D, 0, sizeof(float) * D);
            memset(K + i * D, 0, sizeof(float) * D);
            memset(V + i * E, 0, sizeof(float) * E);
            from_entry[0][i] = from_entry[1][i] = from_entry[0][n - 1];
        }
        for (int i = 0; i < C; i++) {
            for (int side = 0; side < 2; side++) {  // two float32 for one float64
                high[side][i] = from_entry[side][i];
                low[side][i] = from_entry[side][i] - high[side][i];
            }
            query_weight[i] = from_entry[0][i];
            key_weight[i] = exit - entry - from_entry[1][i];
        }
        for (int i = 0; i < C; i += W) {
            *(vf *)(query_weight + i) = exponential(*(vf *)(query_weight + i));
            *(vf *)(key_weight + i) = exponential(*(vf *)(key_weight + i));
        }
        for (int i = 0; i < C; i += W) for (int d = 0; d < D; d += W) transpose(K + i * D + d, D, KT + d * C + i, C);
        for (int m = 0; m < C; m += ROWS) multiply(ROWS, depth, m + ROWS, Q + m * D, D, 1, KT, C, A + m * C, C, 0);
        for (int i = 0; i < C; i++) {
            own[i] = A[i * C + i];
            for (int j = 0; j < i / ROWS * ROWS + ROWS; j += W) {
                vf *entries = (vf *)(A + i * C + j);
                vf exponents = high[0][i] - *(vf *)(high[1] + j) + (low[0][i] - *(vf *)(low[1] + j));
                *entries = (vf)((vi)(*entries * exponential(exponents)) & (lane + j < i));
            }
        }
        for (int m = 0; m < C; m += ROWS) multiply(ROWS, m + ROWS, E, A + m * C, C, 1, V, E, Y + m * E, E, 0);
        if (t) {
            scale_rows(Q, D, query_weight, n, depth);
            multiply(C, depth, E, Q, D, 1, S, E, Y, E, 1);
        }
        for (int i = 0; i < n; i++) {
            float *y = (float *)row(&p->y, b, h, token[i], 4), *computed = Y + i * E;
            if (p->other.data) {
                double sums[ROWS] = {0};  // of every sixteenth product, for the compiler to add vectors
                load(other, &p->other, b, h, token[i], p->width, 1);
                for (int e = 0; e < E; e += ROWS)
                    for (int j = 0; j < ROWS; j++) sums[j] += (double)other[e + j] * computed[e + j];
                for (int j = 1; j < ROWS; j++) sums[0] += sums[j];
                *(double *)row(&p->dots, b, h, token[i], 8) = sums[0];
            }
            if (p->diagonal) {
                float factor = p->diagonal == 1 ? own[i] : *(float *)row(&p->given, b, h, token[i], 4);
                for (int e = 0; e < E; e++) computed[e] += factor * V[i * E + e];
            }
            if (p->add) for (int e = 0; e < width; e++) y[e] += computed[e];
            else memcpy(y, computed, sizeof(float) * width);
        }
        if (last) return;
        vf across = {0};
        across += (float)(exit - entry);
        scale_rows(K, D, key_weight, n, depth);
        multiply(D, C, E, K, 1, D, V, E, S, E, t ? exponential(across)[0] : 0);
        entry = exit;
        int64_t boundary = p->mirrored ? p->length - t - n : t + n;
        if (p->flows && boundary % SPAN == 0) {
            const int64_t place = boundary / SPAN - 1;
            float *state = recorded + place * D * E;
            if (p->mirrored) {
                double flow = 0;
                for (int i = 0; i < D * E; i++) flow += (double)state[i] * S[i];
                p->flows[(b * p->heads + h) * boundaries(p) + place] = flow;
            } else memcpy(state, S, sizeof(float) * D * E);
        }
    }
}

static long triangle_memory(const struct problem *p) {
    const long D = round_up(p->depth), E = round_up(p->width);
    return C * (3 * D + 2 * E + C) + E + D * E * (p->flows ? 1 + boundaries(p) : 1);
}

// A thread keeps its memory, unless it is large: the system would hand out every page again, full of zeros.
enum { KEPT = 1 << 23 };
static _Thread_local struct { void *memory; size_t size; } own;
static pthread_key_t of_thread;  // frees the memory of a thread that ends

__attribute__((constructor)) static void create_key(void) { pthread_key_create(&of_thread, free); }

static void *resize(size_t size) {
    free(own.memory);
    own.memory = size ? aligned_alloc(64, size) : 0;
    own.size = own.memory ? size : 0;
    pthread_setspecific(of_thread, own.memory);
    return own.memory;
}

static void *reserve(size_t size) { return size > own.size ? resize(size) : own.memory; }

static void release(void) { if (own.size > KEPT) resize(0); }

// Solves `count` problems that agree in batches, heads, threads and parts. A thread takes one head, or part of one, at
// a time and solves all problems for it in their order, while what they share is in its cache. CLEARED: whether
// columns that are padding must be 0 at first.
#define OVER_HEADS(NAME, KIND, PARTS, CLEARED) \
int lion_##NAME(const struct KIND *p, int64_t count) { \
    int failed = 0; \
    size_t size = 0; \
    for (int64_t i = 0; i < count; i++) { \
        const size_t needed = (sizeof(float) * NAME##_memory(p + i) + 63) / 64 * 64; \
        size = needed > size ? needed : size; \
    } \
    _Pragma("omp parallel num_threads(p->threads) reduction(|:failed)") \
    { \
        unsigned mode = flush_denormals(); \
        float *memory = reserve(size); \
        if (CLEARED && memory && (p->depth % ROWS || p->width % ROWS)) memset(memory, 0, size); \
        failed = !memory; \
        _Pragma("omp for") \
        for (int64_t n = 0; n < p->batch * p->heads * (PARTS); n++) for (int64_t i = 0; memory && i < count; i++) \
            NAME##_head(p + i, n / (PARTS) / p->heads, n / (PARTS) % p->heads, n % (PARTS), memory); \
        release(); \
        restore(mode); \
    } \
    return failed; \
}
OVER_HEADS(triangle, problem, p->parts, 0)

// Log decays, (batch, orders * heads, length), and their sums before a token and, negative, up to it, side by side for
// each order: (batch, heads, length, 2 * orders). order: the token at each place, (orders, length), or null
// for one.
struct sums_problem {
    int64_t batch, heads, length, threads, orders;
    double lowest;
    const int64_t *order;
    struct view decays, sums, of_decays;
};

static double *sums_at(const struct sums_problem *p, int64_t b, int64_t h, int64_t token) {
    return (double *)row(&p->sums, b, h % p->heads, token, 8) + 2 * (h / p->heads);
}

#define IN_ORDER(p, h, t) ((p)->order ? (p)->order[(h) / (p)->heads * (p)->length + (t)] : (t))

// Whether each of some orders of `length` tokens, (orders, length), has every token once.
int lion_are_orders(const int64_t *order, int64_t orders, int64_t length) {
    uint8_t *seen = malloc(length);
    for (int64_t n = 0; seen && n < orders * length; n++) {
        if (n % length == 0) memset(seen, 0, length);
        if (order[n] < 0 || order[n] >= length || seen[order[n]]++) orders = 0;
    }
    free(seen);
    return seen && orders;
}

// From log decays, in float32, to their sums.
void lion_sums(const struct sums_problem *p) {
    const int64_t heads = p->orders * p->heads;
#pragma omp parallel for num_threads(p->threads)
    for (int64_t n = 0; n < p->batch * heads; n++) {
        double sum = 0;
        for (int64_t b = n / heads, h = n % heads, t = 0; t < p->length; t++) {
            const int64_t token = IN_ORDER(p, h, t);
            double *sums = sums_at(p, b, h, token), decay = *(float *)row(&p->decays, b, h, token, 4);
            sums[0] = sum;
            sum += decay < p->lowest ? p->lowest : decay;
            sums[1] = -sum;
        }
    }
}

// From gradients of the sums to those of the decays, in float32, or of the only one of a head (token stride 0).
void lion_sums_gradient(const struct sums_problem *p) {
    const int64_t heads = p->orders * p->heads;
#pragma omp parallel for num_threads(p->threads)
    for (int64_t n = 0; n < p->batch * heads; n++) {
        double after = 0, total = 0;
        for (int64_t b = n / heads, h = n % heads, t = p->length - 1; t >= 0; t--) {
            const int64_t token = IN_ORDER(p, h, t);
            const double *grad = sums_at(p, b, h, token);
            if (!(*(float *)row(&p->decays, b, h, token, 4) < p->lowest)) total += after - grad[1];
            *(float *)row(&p->of_decays, b, h, token, 4) = total;
            if (p->of_decays.token) total = 0;
            after += grad[0] - grad[1];
        }
    }
}

// 1 in each of 4 `count` bytes with probability 1 - dropped / 2^16, else 0, from 64 bits for every four. The bits are
// those of SplitMix64 (Steele et al., 2014), which computes each number from its place: threads share nothing.
void lion_keep(uint8_t *kept, int64_t count, uint64_t seed, uint16_t dropped, int threads) {
#pragma omp parallel for simd num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
        uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        z ^= z >> 31;
        uint32_t bytes = (uint16_t)z >= dropped;
        bytes |= (uint32_t)((uint16_t)(z >> 16) >= dropped) << 8;
        bytes |= (uint32_t)((uint16_t)(z >> 32) >= dropped) << 16;
        bytes |= (uint32_t)((uint16_t)(z >> 48) >= dropped) << 24;
        ((uint32_t *)kept)[i] = bytes;
    }
}
"""

// One pass of a decoder-only transformer (Llama, Qwen2, Qwen3) over tokens of many sequences, in float32 on one thread.
//
// ``feed`` computes the KV of its tokens and, if wanted, their logits; ``draw`` samples from these. ``native_step.py`` owns
// all memory and calls these functions; the structs below are repeated there.
//
// Layouts. A weight matrix [outputs, inputs] is packed into panels [outputs / PANEL][inputs][PANEL], so that a product reads
// it in order and keeps PANEL sums per token in registers; missing outputs are zeros. The weights of an RMS norm are
// multiplied into the matrix behind it. A row of every buffer is padded to whole panels. The KV cache is [layer][place][key
// heads, then value heads][dim]; position p of a slot lies at place table[slot][p / piece] * piece + p % piece.
//
// A sum over the tokens of a sequence never depends on other rows, so a token's result is independent of the batch.

#include <math.h>
#include <stdint.h>
#include <string.h>

// A vector wider than a register would be kept in memory, at a tenth of the speed. WIDTH is that of attention, whose heads
// may be as small as eight dimensions; LANES is that of products, of which TILE tokens keep their sums in registers.
#if defined(__AVX512F__)
#define WIDTH 8
#define LANES 16
#define TILE 12 // 24 of 32 registers
#elif defined(__AVX__)
#define WIDTH 8
#define LANES 8
#define TILE 6 // 12 of 16 registers
#elif defined(__ARM_NEON)
#define WIDTH 4
#define LANES 4
#define TILE 12
#else
#define WIDTH 4
#define LANES 4
#define TILE 6
#endif
#define PANEL (2 * LANES)
#define INLINE static inline __attribute__((always_inline))

typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef float LooseLanes __attribute__((vector_size(LANES * 4), aligned(4), may_alias)); // in memory
typedef float Wide __attribute__((vector_size(WIDTH * 4)));
typedef float LooseWide __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));
typedef int32_t WideInts __attribute__((vector_size(WIDTH * 4)));

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (WideInts){__VA_ARGS__})
#endif

typedef struct {
    const float *qkv, *qkv_bias, *qk_norm, *output, *output_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    float *kv;
} Layer;

typedef struct {
    int64_t num_layers, hidden, heads, kv_heads, dim, ffn, vocab;
    int64_t rows;          // tokens of one pass over the layers: what the buffers hold
    int64_t piece, pieces; // positions of one entry of the table, entries of one slot
    double eps;
    const Layer *layers;
    const float *embedding, *head, *cos, *sin; // cos and sin [context, dim]; sin has the sign of the rotation
    const int64_t *table;
    float *x, *normed, *qkv, *attended, *gate_up, *inner, *scores;
} Model;

INLINE int64_t padded(int64_t width) { return (width + PANEL - 1) / PANEL * PANEL; }

int64_t panel_width(void) { return PANEL; }

// weight [outputs][inputs] into panels, times scale [inputs] where it is given.
void pack(const float *restrict weight, const float *restrict scale, int64_t outputs, int64_t inputs, float *restrict panels) {
    for (int64_t first = 0; first < outputs; first += PANEL, panels += inputs * PANEL) {
        int64_t num = outputs - first < PANEL ? outputs - first : PANEL;
        if (num < PANEL) memset(panels, 0, sizeof(float) * inputs * PANEL);
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t n = 0; n < num; n++)
                panels[k * PANEL + n] = weight[(first + n) * inputs + k] * (scale ? scale[k] : 1.0f);
    }
}

// One panel's outputs for ``num`` rows, a constant where this is inlined.
INLINE void tile(
    int num, int adds, const float *in, int64_t in_width, const float *panel, int64_t inputs, const float *bias, float *out,
    int64_t out_width
) {
    Lanes sums[TILE][2];
    for (int row = 0; row < num; row++)
        for (int half = 0; half < 2; half++)
            sums[row][half] = (Lanes){0};
    for (int half = 0; bias && half < 2; half++)
        for (int row = 0; row < num; row++) sums[row][half] = *(const LooseLanes *)(bias + half * LANES);
    for (int64_t k = 0; k < inputs; k++) {
        Lanes low = *(const LooseLanes *)(panel + k * PANEL), high = *(const LooseLanes *)(panel + k * PANEL + LANES);
        for (int row = 0; row < num; row++) {
            sums[row][0] += in[row * in_width + k] * low;
            sums[row][1] += in[row * in_width + k] * high;
        }
    }
    for (int row = 0; row < num; row++)
        for (int half = 0; half < 2; half++) {
            LooseLanes *place = (LooseLanes *)(out + row * out_width + half * LANES);
            *place = (adds ? (Lanes)*place : (Lanes){0}) + sums[row][half];
        }
}

// out [rows][outputs] = in [rows][inputs] times the matrix, plus bias, plus out where ``adds``.
INLINE void product(
    int adds, int64_t rows, const float *in, int64_t inputs, const float *panels, const float *bias, float *out, int64_t outputs
) {
    int64_t in_width = padded(inputs), out_width = padded(outputs);
    for (int64_t first = 0; first < outputs; first += PANEL, panels += inputs * PANEL) {
        const float *own_bias = bias ? bias + first : 0;
#define ROWS(num) tile(num, adds, in + row * in_width, in_width, panels, inputs, own_bias, out + row * out_width + first, out_width)
        int64_t row = 0;
        for (; row + TILE <= rows; row += TILE) ROWS(TILE);
        switch (rows - row) {
        case 1: ROWS(1); break;
        case 2: ROWS(2); break;
        case 3: ROWS(3); break;
        case 4: ROWS(4); break;
        case 5: ROWS(5); break;
#if TILE > 6
        case 6: ROWS(6); break;
        case 7: ROWS(7); break;
        case 8: ROWS(8); break;
        case 9: ROWS(9); break;
        case 10: ROWS(10); break;
        case 11: ROWS(11); break;
#endif
        }
#undef ROWS
    }
}

static void store_product(
    int64_t rows, const float *in, int64_t inputs, const float *panels, const float *bias, float *out, int64_t outputs
) {
    product(0, rows, in, inputs, panels, bias, out, outputs);
}

static void add_product(
    int64_t rows, const float *in, int64_t inputs, const float *panels, const float *bias, float *out, int64_t outputs
) {
    product(1, rows, in, inputs, panels, bias, out, outputs);
}

INLINE double sum_of(Wide v) {
    double sum = ((double)v[0] + v[1]) + ((double)v[2] + v[3]);
#if WIDTH == 8
    sum += ((double)v[4] + v[5]) + ((double)v[6] + v[7]);
#endif
    return sum;
}

INLINE float most_of(Wide v) {
    float most = v[0];
    for (int i = 1; i < WIDTH; i++) most = most > v[i] ? most : v[i];
    return most;
}

// 1 / sqrt(mean(values²) + eps)
INLINE float scale_of(const float *values, int64_t num, double eps) {
    Wide sums = {0};
    int64_t i = 0;
    for (; i + WIDTH <= num; i += WIDTH) {
        Wide part = *(const LooseWide *)(values + i);
        sums += part * part;
    }
    float sum = (float)sum_of(sums);
    for (; i < num; i++) sum += values[i] * values[i];
    return 1.0f / sqrtf(sum / (float)num + (float)eps);
}

static void normalise(int64_t rows, int64_t hidden, double eps, const float *restrict x, float *restrict normed) {
    for (int64_t row = 0; row < rows; row++, x += padded(hidden), normed += padded(hidden)) {
        float scale = scale_of(x, hidden, eps);
        for (int64_t i = 0; i < hidden; i++) normed[i] = x[i] * scale;
    }
}

// Normalise a query or key head where the model does, rotate it, and multiply it by ``factor``.
INLINE void turn(
    float *restrict head, const float *restrict norm, const float *restrict cos, const float *restrict sin, int64_t dim,
    double eps, float factor
) {
    int64_t half = dim / 2;
    if (norm) {
        float scale = scale_of(head, dim, eps);
        for (int64_t i = 0; i < dim; i++) head[i] *= scale * norm[i];
    }
    for (int64_t i = 0; i < half; i++) {
        float left = head[i], right = head[i + half];
        head[i] = (left * cos[i] + right * sin[i]) * factor;
        head[i + half] = (right * cos[i + half] + left * sin[i + half]) * factor;
    }
}

INLINE Wide where(WideInts mask, Wide yes, Wide no) { // C has no choice between vectors
    return (Wide)((mask & (WideInts)yes) | (~mask & (WideInts)no));
}

// exp(x) with a relative error below 2e-7; 0 below -87, NaN of NaN.
INLINE Wide exp_of(Wide x) {
    const float shift = 12582912.0f; // 1.5 * 2^23: the sum's lowest bits are the rounded integer
    WideInts vanishes = x < -87.0f;
    x = where(vanishes, (Wide){0} - 87.0f, x);
    x = where(x > 88.0f, (Wide){0} + 88.0f, x);
    Wide shifted = x * 1.44269504f + shift;
    Wide whole = shifted - shift;
    Wide rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Wide sum = rest * 1.9875691500e-4f + 1.3981999507e-3f; // Cephes, expf
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    WideInts exponent = (WideInts)shifted - (WideInts)((Wide){0} + shift);
    return where(vanishes, (Wide){0}, sum * (Wide)((exponent + 127) << 23));
}

// The sums of WIDTH vectors, as one vector.
INLINE Wide sums_of(const Wide v[WIDTH]) {
#if WIDTH == 8
    Wide pairs[4], fours[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = PICK(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        fours[i] = PICK(pairs[2 * i], pairs[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                   PICK(pairs[2 * i], pairs[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return PICK(fours[0], fours[1], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(fours[0], fours[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    Wide low = PICK(v[0], v[1], 0, 4, 2, 6) + PICK(v[0], v[1], 1, 5, 3, 7);
    Wide high = PICK(v[2], v[3], 0, 4, 2, 6) + PICK(v[2], v[3], 1, 5, 3, 7);
    return PICK(low, high, 0, 1, 4, 5) + PICK(low, high, 2, 3, 6, 7);
#endif
}

// Scores of ``num`` positions, at most WIDTH, from ``keys`` on; the others repeat the last one's.
INLINE Wide scores_of(const float *query, const float *keys, int64_t stride, int64_t dim, int64_t num) {
    Wide sums[WIDTH];
    for (int64_t p = 0; p < WIDTH; p++) {
        const float *key = keys + (p < num ? p : num - 1) * stride;
        sums[p] = *(const LooseWide *)query * *(const LooseWide *)key;
        for (int64_t d = WIDTH; d < dim; d += WIDTH) sums[p] += *(const LooseWide *)(query + d) * *(const LooseWide *)(key + d);
    }
    return sums_of(sums);
}

// Add the values of ``num`` positions, times their weights, to ``width`` times WIDTH dimensions of ``out``.
INLINE void add_values(int width, float *out, const float *weights, const float *values, int64_t stride, int64_t num) {
    Wide sums[2][4] = {0}; // apart, because a sum waits for the one before
    int64_t p = 0;
    for (; p + 4 <= num; p += 4)
        for (int d = 0; d < width; d++)
            for (int i = 0; i < 4; i++) sums[d][i] += weights[p + i] * *(const LooseWide *)(values + (p + i) * stride + WIDTH * d);
    for (; p < num; p++)
        for (int d = 0; d < width; d++) sums[d][0] += weights[p] * *(const LooseWide *)(values + p * stride + WIDTH * d);
    for (int d = 0; d < width; d++) *(LooseWide *)(out + WIDTH * d) += (sums[d][0] + sums[d][1]) + (sums[d][2] + sums[d][3]);
}

// One query head over positions 0 to ``last`` of the slot whose row of the table is ``places``; ``keys`` is of its key head.
static void attend(
    const Model *model, const float *query, const float *keys, const int64_t *places, int64_t last, float *out
) {
    int64_t dim = model->dim, piece = model->piece, stride = 2 * model->kv_heads * dim, end = last + 1;
    float *scores = model->scores;
    Wide most = (Wide){0} - INFINITY;
    for (int64_t first = 0; first < end; first += piece) {
        const float *place = keys + places[first / piece] * piece * stride;
        int64_t num = end - first < piece ? end - first : piece, p = 0;
        for (; p + WIDTH <= num; p += WIDTH) {
            Wide found = scores_of(query, place + p * stride, stride, dim, WIDTH);
            *(LooseWide *)(scores + first + p) = found;
            most = where(most > found, most, found);
        }
        if (p < num) { // what lies behind the last position may be anything
            Wide found = scores_of(query, place + p * stride, stride, dim, num - p);
            *(LooseWide *)(scores + first + p) = found;
            most = where(most > found, most, found);
        }
    }
    float top = most_of(most);
    for (int64_t p = end; p % WIDTH; p++) scores[p] = -INFINITY;
    Wide sums = {0};
    for (int64_t p = 0; p < end; p += WIDTH) {
        Wide weights = exp_of(*(LooseWide *)(scores + p) - top);
        *(LooseWide *)(scores + p) = weights;
        sums += weights;
    }
    memset(out, 0, sizeof(float) * dim);
    for (int64_t first = 0; first < end; first += piece) {
        const float *values = keys + (places[first / piece] * piece * 2 + 1) * (stride / 2);
        int64_t num = end - first < piece ? end - first : piece, d = 0;
        for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH) add_values(2, out + d, scores + first, values + d, stride, num);
        if (d < dim) add_values(1, out + d, scores + first, values + d, stride, num);
    }
    float scale = 1.0f / (float)sum_of(sums);
    for (int64_t d = 0; d < dim; d++) out[d] *= scale;
}

// Rotate queries and keys of one layer, and write keys and values into the cache.
static void remember(const Model *model, const Layer *layer, int64_t rows, const int64_t *slots, const int64_t *positions) {
    int64_t heads = model->heads, kv_heads = model->kv_heads, dim = model->dim, width = (heads + 2 * kv_heads) * dim;
    float factor = 1.0f / sqrtf((float)dim);
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = positions[row];
        float *qkv = model->qkv + row * padded(width);
        for (int64_t head = 0; head < heads + kv_heads; head++)
            turn(
                qkv + head * dim, layer->qk_norm ? layer->qk_norm + head * dim : 0, model->cos + at * dim, model->sin + at * dim,
                dim, model->eps, head < heads ? factor : 1.0f
            );
        int64_t place = model->table[slots[row] * model->pieces + at / model->piece] * model->piece + at % model->piece;
        memcpy(layer->kv + place * 2 * kv_heads * dim, qkv + heads * dim, sizeof(float) * 2 * kv_heads * dim);
    }
}

static void activate(int64_t rows, int64_t ffn, const float *gate_up, float *inner) {
    for (int64_t row = 0; row < rows; row++, gate_up += padded(2 * ffn), inner += padded(ffn))
        for (int64_t i = 0; i < ffn; i += WIDTH) { // a row's padding takes what the last step writes beyond
            Wide gate = *(const LooseWide *)(gate_up + i), up = *(const LooseWide *)(gate_up + ffn + i);
            *(LooseWide *)(inner + i) = gate / (1.0f + exp_of(-gate)) * up;
        }
}

static void pass(const Model *model, int64_t rows, const int64_t *tokens, const int64_t *slots, const int64_t *positions, float *logits) {
    int64_t hidden = model->hidden, dim = model->dim, heads = model->heads, per_head = heads / model->kv_heads, ffn = model->ffn;
    int64_t qkv_width = (heads + 2 * model->kv_heads) * dim;
    for (int64_t row = 0; row < rows; row++)
        memcpy(model->x + row * padded(hidden), model->embedding + tokens[row] * hidden, sizeof(float) * hidden);
    for (int64_t index = 0; index < model->num_layers; index++) {
        const Layer *layer = model->layers + index;
        normalise(rows, hidden, model->eps, model->x, model->normed);
        store_product(rows, model->normed, hidden, layer->qkv, layer->qkv_bias, model->qkv, qkv_width);
        remember(model, layer, rows, slots, positions);
        if (!logits && index == model->num_layers - 1) return; // the rest of the last layer only feeds logits
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < heads; head++)
                attend(
                    model, model->qkv + row * padded(qkv_width) + head * dim, layer->kv + head / per_head * dim,
                    model->table + slots[row] * model->pieces, positions[row],
                    model->attended + row * padded(heads * dim) + head * dim
                );
        add_product(rows, model->attended, heads * dim, layer->output, layer->output_bias, model->x, hidden);
        normalise(rows, hidden, model->eps, model->x, model->normed);
        store_product(rows, model->normed, hidden, layer->gate_up, layer->gate_up_bias, model->gate_up, 2 * ffn);
        activate(rows, ffn, model->gate_up, model->inner);
        add_product(rows, model->inner, ffn, layer->down, layer->down_bias, model->x, hidden);
    }
    normalise(rows, hidden, model->eps, model->x, model->normed);
    store_product(rows, model->normed, hidden, model->head, 0, logits, model->vocab);
}

// Write the KV of tokens [num] at positions [num] of slots [num]; logits [num][vocab, padded] where not NULL. A position
// attends to all positions of its slot up to itself, of which earlier calls or earlier tokens of this one wrote the KV.
void feed(const Model *model, int64_t num, const int64_t *tokens, const int64_t *slots, const int64_t *positions, float *logits) {
    for (int64_t first = 0; first < num; first += model->rows) {
        int64_t rows = num - first < model->rows ? num - first : model->rows;
        pass(model, rows, tokens + first, slots + first, positions + first, logits ? logits + first * padded(model->vocab) : 0);
    }
}

// A token [num] per row of logits [num][vocab, padded], which are overwritten, and its log-probability [num], by the inverse
// of the distribution function at uniform [num], in [0, 1). Of a row that is not finite, neither is the log-probability.
void draw(int64_t num, int64_t vocab, float *logits, const double *uniform, int64_t *tokens, float *logprobs) {
    for (int64_t row = 0; row < num; row++, logits += padded(vocab)) {
        for (int64_t i = vocab; i % WIDTH; i++) logits[i] = -INFINITY;
        Wide most = *(LooseWide *)logits;
        for (int64_t i = WIDTH; i < vocab; i += WIDTH) {
            Wide part = *(LooseWide *)(logits + i);
            most = where(most > part, most, part);
        }
        float top = most_of(most);
        double total = 0;
        for (int64_t i = 0; i < vocab; i += WIDTH) total += sum_of(exp_of(*(LooseWide *)(logits + i) - top));
        double target = uniform[row] * total, before = 0;
        int64_t token = 0;
        for (int64_t first = 0; first < vocab; first += WIDTH) {
            Wide part = exp_of(*(LooseWide *)(logits + first) - top);
            double sum = before + sum_of(part); // the same additions as above: the last sum is the total
            if (!(sum <= target)) {
                // In another order the additions may round to less than the target: then it is the last possible token.
                for (int64_t i = 0; i < WIDTH && !(before > target); i++)
                    if (part[i] > 0) {
                        token = first + i;
                        before += part[i];
                    }
                break;
            }
            before = sum;
        }
        tokens[row] = token;
        logprobs[row] = (float)((double)(logits[token] - top) - log(total));
    }
}

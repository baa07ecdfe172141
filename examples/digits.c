/*
 * Learn to read handwritten digits, in C, on any number of processes.
 *
 *     cc -O3 digits.c $(pkg-config --cflags --libs accel) -lm -o digits \
 *             -Wl,-rpath,$(pkg-config --variable=libdir accel)
 *     accel launch -n 2 ./digits digits.bin
 *     ./digits digits.bin
 *
 * An ordinary training program: a network of three layers with dropout, AdamW and a
 * one-cycle schedule. The lines that make it distributed are marked "accel". The
 * data file is made by dev/export_digits.py.
 */

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <accel.h>

enum { N_LAYERS = 3, CLASSES = 10, BATCH = 64, EPOCHS = 20, WIDEST = 512 };

static const int widths[N_LAYERS + 1] = { 64, 512, 64, CLASSES };
static const float LEARNING_RATE = 5e-3f, DROPOUT = 0.5f, WEIGHT_DECAY = 0.01f;

struct layer {
	int n_in, n_out;
	float *weight, *bias;      /* (n_in, n_out) and (n_out) */
	float *d_weight, *d_bias;  /* their gradients */
	float *moments[4];         /* first and second, of weight and of bias */
	float out[BATCH * WIDEST]; /* after the activation */
	float d_out[BATCH * WIDEST];
	float keep[BATCH * WIDEST]; /* of dropout: 0, or 1 / (1 - DROPOUT) */
};

struct set {
	uint32_t n;
	float *pixels; /* (n, 64) */
	uint8_t *labels;
};

static void die(const char *what, const char *why)
{
	fprintf(stderr, "digits: %s: %s\n", what, why);
	exit(1);
}

/* Every rank has its own stream, and a second one that all ranks share. */
static uint32_t next_random(uint64_t *state)
{
	uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static float uniform(uint64_t *state)
{
	return (float)next_random(state) / 4294967296.0f;
}

/* ---- data ------------------------------------------------------------------------ */

static void read_all(FILE *f, void *to, size_t n)
{
	if (fread(to, 1, n, f) != n)
		die("read the data", "it is shorter than it says");
}

static void *allocate(size_t n, size_t size)
{
	void *p = calloc(n ? n : 1, size);

	if (!p)
		die("allocate", "no memory");
	return p;
}

static void read_set(FILE *f, struct set *s, uint32_t n)
{
	s->n = n;
	s->pixels = allocate((size_t)n * (size_t)widths[0], sizeof(float));
	s->labels = allocate(n, 1);
	read_all(f, s->pixels, (size_t)n * (size_t)widths[0] * sizeof(float));
	read_all(f, s->labels, n);
	for (uint32_t i = 0; i < n; i++)
		if (s->labels[i] >= CLASSES)
			die("read the data", "a label is no digit");
}

static void load(const char *path, struct set *train, struct set *test)
{
	FILE *f = fopen(path, "rb");
	uint32_t head[3];
	char magic[8];

	if (!f)
		die(path, "cannot be read; dev/export_digits.py makes it");
	read_all(f, magic, sizeof(magic));
	read_all(f, head, sizeof(head));
	if (memcmp(magic, "DIGITS1", 8) != 0 || head[2] != (uint32_t)widths[0] ||
	    head[0] > 1000000 || head[1] > 1000000)
		die(path, "is no file of digits");
	read_set(f, train, head[0]);
	read_set(f, test, head[1]);
	fclose(f);
}

/* ---- the network ------------------------------------------------------------------- */

static void init_layer(struct layer *l, int n_in, int n_out, uint64_t *random)
{
	float bound = 1 / sqrtf((float)n_in);
	size_t n = (size_t)n_in * (size_t)n_out, b = (size_t)n_out;

	*l = (struct layer){ .n_in = n_in, .n_out = n_out };
	l->weight = allocate(n, sizeof(float));
	l->bias = allocate(b, sizeof(float));
	l->d_weight = allocate(n, sizeof(float));
	l->d_bias = allocate(b, sizeof(float));
	for (int i = 0; i < 4; i++)
		l->moments[i] = allocate(i < 2 ? n : b, sizeof(float));
	for (size_t i = 0; i < n; i++)
		l->weight[i] = (2 * uniform(random) - 1) * bound;
	for (size_t i = 0; i < b; i++)
		l->bias[i] = (2 * uniform(random) - 1) * bound;
}

/* out = in * weight + bias, for @n rows. */
static void multiply(const struct layer *l, const float *in, float *out, int n)
{
	for (int row = 0; row < n; row++) {
		float *o = out + (size_t)row * (size_t)l->n_out;

		memcpy(o, l->bias, (size_t)l->n_out * sizeof(float));
		for (int i = 0; i < l->n_in; i++) {
			float x = in[(size_t)row * (size_t)l->n_in + (size_t)i];
			const float *w = l->weight + (size_t)i * (size_t)l->n_out;

			for (int j = 0; j < l->n_out; j++)
				o[j] += x * w[j];
		}
	}
}

/* ReLU after all layers but the last, dropout after the first when training. */
static void forward(struct layer *layers, const float *in, int n, uint64_t *dropout)
{
	for (int k = 0; k < N_LAYERS; k++) {
		struct layer *l = &layers[k];

		multiply(l, in, l->out, n);
		for (int i = 0; k < N_LAYERS - 1 && i < n * l->n_out; i++) {
			l->keep[i] = 1;
			if (k == 0 && dropout)
				l->keep[i] = uniform(dropout) < DROPOUT
						     ? 0
						     : 1 / (1 - DROPOUT);
			l->keep[i] = l->out[i] > 0 ? l->keep[i] : 0;
			l->out[i] *= l->keep[i];
		}
		in = l->out;
	}
}

/* Mean cross entropy; leaves its gradient in the last layer's d_out. */
static float loss_of(struct layer *last, const uint8_t *labels, int n)
{
	float total = 0;

	for (int row = 0; row < n; row++) {
		const float *o = last->out + row * CLASSES;
		float *d = last->d_out + row * CLASSES, most = o[0], sum = 0;

		for (int j = 1; j < CLASSES; j++)
			most = o[j] > most ? o[j] : most;
		for (int j = 0; j < CLASSES; j++)
			sum += d[j] = expf(o[j] - most);
		for (int j = 0; j < CLASSES; j++)
			d[j] = (d[j] / sum - (j == labels[row])) / (float)n;
		total += logf(sum) + most - o[labels[row]];
	}
	return n ? total / (float)n : 0;
}

/* From d_out to the gradients of this layer, and to d_in where that is wanted. */
static void backward_layer(struct layer *l, const float *in, float *d_in, int n)
{
	memset(l->d_weight, 0, (size_t)l->n_in * (size_t)l->n_out * sizeof(float));
	memset(l->d_bias, 0, (size_t)l->n_out * sizeof(float));
	for (int row = 0; row < n; row++) {
		const float *d = l->d_out + (size_t)row * (size_t)l->n_out;

		for (int j = 0; j < l->n_out; j++)
			l->d_bias[j] += d[j];
		for (int i = 0; i < l->n_in; i++) {
			size_t at = (size_t)i * (size_t)l->n_out;
			float x = in[(size_t)row * (size_t)l->n_in + (size_t)i], sum = 0;

			for (int j = 0; j < l->n_out; j++) {
				l->d_weight[at + (size_t)j] += x * d[j];
				sum += l->weight[at + (size_t)j] * d[j];
			}
			if (d_in)
				d_in[(size_t)row * (size_t)l->n_in + (size_t)i] = sum;
		}
	}
}

static void backward(struct layer *layers, const float *in, int n)
{
	for (int k = N_LAYERS - 1; k >= 0; k--) {
		struct layer *below = k ? &layers[k - 1] : NULL;

		backward_layer(&layers[k], below ? below->out : in,
			       below ? below->d_out : NULL, n);
		for (int i = 0; below && i < n * below->n_out; i++)
			below->d_out[i] *= below->keep[i];
	}
}

/* ---- AdamW
 * ----------------------------------------------------------------------------- */

static void adamw(float *p, const float *g, float *m, float *v, size_t n, float lr,
		  int step)
{
	float m_scale = 1 / (1 - powf(0.9f, (float)step));
	float v_scale = 1 / (1 - powf(0.999f, (float)step));

	for (size_t i = 0; i < n; i++) {
		m[i] = 0.9f * m[i] + 0.1f * g[i];
		v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
		p[i] -= lr * (WEIGHT_DECAY * p[i] +
			      m[i] * m_scale / (sqrtf(v[i] * v_scale) + 1e-8f));
	}
}

static void optimize(struct layer *layers, float lr, int step)
{
	for (int k = 0; k < N_LAYERS; k++) {
		struct layer *l = &layers[k];
		size_t n = (size_t)l->n_in * (size_t)l->n_out;

		adamw(l->weight, l->d_weight, l->moments[0], l->moments[1], n, lr, step);
		adamw(l->bias, l->d_bias, l->moments[2], l->moments[3], (size_t)l->n_out,
		      lr, step);
	}
}

/* Up over the first three tenths, then down to nearly nothing, along cosines. */
static float one_cycle(int step, int n_steps)
{
	float up = 0.3f * (float)n_steps, at = (float)step;
	float from = at < up ? LEARNING_RATE / 25 : LEARNING_RATE;
	float to = at < up ? LEARNING_RATE : LEARNING_RATE / 250000;
	float share = at < up ? at / up : (at - up) / ((float)n_steps - up);

	return to + (from - to) * (1 + cosf(3.14159265f * share)) / 2;
}

/* ---- training
 * ----------------------------------------------------------------------------- */

static void shuffle(uint32_t *order, uint32_t n, uint64_t *random)
{
	for (uint32_t i = n; i > 1; i--) {
		uint32_t j = next_random(random) % i, other = order[j];

		order[j] = order[i - 1];
		order[i - 1] = other;
	}
}

/* This rank's pictures of a batch that all ranks share: every size-th one. */
static int take_batch(const struct set *s, const uint32_t *order, uint32_t from, int rank,
		      int size, float *pixels, uint8_t *labels)
{
	int n = 0;

	for (uint32_t i = from + (uint32_t)rank; i < from + BATCH && i < s->n;
	     i += (uint32_t)size) {
		memcpy(pixels + n * widths[0], s->pixels + (size_t)order[i] * 64,
		       (size_t)widths[0] * sizeof(float));
		labels[n++] = s->labels[order[i]];
	}
	return n;
}

/* The share of the test set that was read right, on every rank. */
static double accuracy(accel_world *world, struct layer *layers, const struct set *test)
{
	uint32_t rank = (uint32_t)accel_rank(world), size = (uint32_t)accel_size(world);
	uint32_t from = test->n * rank / size, end = test->n * (rank + 1) / size,
		 right = 0;
	uint8_t *own = allocate(test->n, 1), *all = allocate(test->n, 1);
	uint64_t *rows = allocate(size, sizeof(*rows));
	struct accel_array answers = { own, ACCEL_UINT8, 1, { end - from } };

	for (uint32_t i = from; i < end; i += BATCH) {
		int n = end - i < BATCH ? (int)(end - i) : BATCH;

		forward(layers, test->pixels + (size_t)i * 64, n, NULL);
		for (int row = 0; row < n; row++) {
			const float *o = layers[N_LAYERS - 1].out + row * CLASSES;

			for (int j = 1; j < CLASSES; j++)
				if (o[j] > o[own[i - from + (uint32_t)row]])
					own[i - from + (uint32_t)row] = (uint8_t)j;
		}
	}
	if (accel_gather(world, &answers, rows) < 0 || /* accel: all answers, in order */
	    accel_gather_into(world, all) < 0)
		die("gather", accel_error());
	for (uint32_t i = 0; i < test->n; i++)
		right += all[i] == test->labels[i];
	free(own);
	free(all);
	free(rows);
	return (double)right / test->n;
}

static void train(accel_world *world, struct layer *layers, const struct set *set)
{
	int rank = accel_rank(world), size = accel_size(world);
	int n_steps = EPOCHS * (int)((set->n + BATCH - 1) / BATCH), step = 0;
	uint64_t shared = 1, own = 1000 + (uint64_t)rank;
	uint32_t *order = allocate(set->n, sizeof(*order));
	static float pixels[BATCH * 64];
	static uint8_t labels[BATCH];
	struct accel_array parameters[2 * N_LAYERS];
	void *gradients[2 * N_LAYERS];
	accel_model *model;

	for (int k = 0; k < N_LAYERS; k++) {
		struct layer *l = &layers[k];
		uint64_t n_in = (uint64_t)l->n_in, n_out = (uint64_t)l->n_out;

		parameters[2 * k] = (struct accel_array){
			l->weight, ACCEL_FLOAT32, 2, { n_in, n_out }
		};
		parameters[2 * k + 1] =
			(struct accel_array){ l->bias, ACCEL_FLOAT32, 1, { n_out } };
		gradients[2 * k] = l->d_weight;
		gradients[2 * k + 1] = l->d_bias;
	}
	if (accel_prepare(world, parameters, 2 * N_LAYERS, 0, &model) < 0) /* accel */
		die("prepare", accel_error());
	for (uint32_t i = 0; i < set->n; i++)
		order[i] = i;
	for (int epoch = 1; epoch <= EPOCHS; epoch++) {
		float total = 0;

		shuffle(order, set->n, &shared);
		for (uint32_t from = 0; from < set->n; from += BATCH) {
			int n = take_batch(set, order, from, rank, size, pixels, labels);

			forward(layers, pixels, n, &own);
			total += loss_of(&layers[N_LAYERS - 1], labels, n);
			backward(layers, pixels, n);
			if (accel_backward(model, gradients) < 0) /* accel: average */
				die("backward", accel_error());
			optimize(layers, one_cycle(step, n_steps), step + 1);
			step++;
			accel_step(world); /* accel: the supervisor sees progress */
		}
		if (rank == 0 && (epoch % 5 == 0 || epoch == EPOCHS))
			printf("epoch %2d  loss %.4f\n", epoch,
			       (double)(total * (float)EPOCHS / (float)n_steps));
	}
	free(order);
}

int main(int argc, char **argv)
{
	static struct layer layers[N_LAYERS];
	struct set train_set, test_set;
	accel_world *world;
	uint64_t random = 1;
	double score;

	if (argc != 2)
		die("usage", "digits DATA");
	if (accel_init(&world) < 0) /* accel: join the other processes, or run alone */
		die("join", accel_error());
	load(argv[1], &train_set, &test_set);
	for (int k = 0; k < N_LAYERS; k++)
		init_layer(&layers[k], widths[k], widths[k + 1], &random);
	train(world, layers, &train_set);
	score = accuracy(world, layers, &test_set);
	if (accel_rank(world) == 0)
		printf("accuracy %.4f\n", score);
	for (int k = 0; k < N_LAYERS; k++) {
		free(layers[k].weight);
		free(layers[k].bias);
		free(layers[k].d_weight);
		free(layers[k].d_bias);
		for (int i = 0; i < 4; i++)
			free(layers[k].moments[i]);
	}
	free(train_set.pixels);
	free(train_set.labels);
	free(test_set.pixels);
	free(test_set.labels);
	accel_finish(world); /* accel */
	return 0;
}
